// SHA-256 by OpenSSL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace tessera {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(const void* bytes, std::size_t count);
  void update(std::string_view bytes) { update(bytes.data(), bytes.size()); }
  // The digest of all so far as 32 raw bytes; starts afresh.
  std::string finish();
  std::string finish_hex();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// 64 lowercase digits for 32 bytes.
std::string to_hex(std::string_view bytes);
std::string sha256_hex(std::string_view bytes);
// Of a whole file; throws Error(kData) naming it when it can't be read.
std::string sha256_of_file(const std::string& path);

}  // namespace tessera
