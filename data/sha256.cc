#include "data/sha256.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "runtime/error.h"

namespace tessera {

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  TESSERA_CHECK(context_ != nullptr);
  TESSERA_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(const void* bytes, std::size_t count) {
  TESSERA_CHECK(EVP_DigestUpdate(context_.get(), bytes, count) == 1);
}

std::string Sha256::finish() {
  std::string digest(32, '\0');
  TESSERA_CHECK(EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()),
                                   nullptr) == 1);
  TESSERA_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  return digest;
}

std::string Sha256::finish_hex() { return to_hex(finish()); }

std::string to_hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

std::string sha256_hex(std::string_view bytes) {
  Sha256 sha;
  sha.update(bytes);
  return sha.finish_hex();
}

std::string sha256_of_file(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    throw Error(ExitCode::kData, path + ": cannot be opened: " + std::strerror(errno));
  }
  std::vector<char> buffer(std::size_t{1} << 20);
  Sha256 sha;
  while (true) {
    const ssize_t got = ::read(file, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const std::string why = std::strerror(errno);
      ::close(file);
      if (got == 0) return sha.finish_hex();
      throw Error(ExitCode::kData, path + ": cannot be read: " + why);
    }
    sha.update(buffer.data(), static_cast<std::size_t>(got));
  }
}

}  // namespace tessera
