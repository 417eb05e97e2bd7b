# The tokenizer's part of the room: included by data/CMakeLists.txt once tessera_data exists.
target_sources(tessera_data PRIVATE byte_pair.cc normalizer.cc pretokenizer.cc tokenizer.cc
                                    unicode_classes.cc utf8.cc vocabulary.cc)
target_link_libraries(tessera_data PRIVATE ICU::uc nlohmann_json::nlohmann_json OpenSSL::Crypto)
