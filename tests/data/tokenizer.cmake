# The tokenizer's tests. With TESSERA_TOKENIZER set those that need the Qwen3 vocabulary are
# compulsory; without it they use the file that launch/fetch_tokenizer keeps, or are skipped.
find_package(ICU REQUIRED COMPONENTS uc i18n)
tessera_test(data_tokenizer_test
  SOURCES tokenizer_test.cc plain_tokenizer.cc ${PROJECT_SOURCE_DIR}/launch/tokenize.cc
  LIBRARIES tessera_data ICU::uc ICU::i18n CLI11::CLI11 nlohmann_json::nlohmann_json
  TIMEOUT 900 LABELS data)
