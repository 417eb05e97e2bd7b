# The tokenizer's tests. With TESSERA_TOKENIZER set those that need the Qwen3 vocabulary are
# compulsory; without it they use the file that launch/fetch_tokenizer keeps, or are skipped.
find_package(ICU REQUIRED COMPONENTS uc i18n)
tessera_test(data_tokenizer_test
  SOURCES tokenizer_test.cc plain_tokenizer.cc
  LIBRARIES tessera_launch ICU::uc ICU::i18n
  TIMEOUT 900 LABELS data)
