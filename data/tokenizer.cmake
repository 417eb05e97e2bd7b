# The tokenizer's part of the room: included by data/CMakeLists.txt once tessera_data exists.
target_sources(tessera_data PRIVATE ${CMAKE_CURRENT_LIST_DIR}/utf8.cc)
target_link_libraries(tessera_data PRIVATE ICU::uc nlohmann_json::nlohmann_json OpenSSL::Crypto)
