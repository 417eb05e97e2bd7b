# The schema with its comments, which the compiled descriptors lack.
set(schema ${CMAKE_CURRENT_BINARY_DIR}/schema.descriptors)
add_custom_command(
  OUTPUT ${schema}
  COMMAND protobuf::protoc --descriptor_set_out=${schema} --include_imports --include_source_info
          -I ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/launch/config.proto
  DEPENDS ${PROJECT_SOURCE_DIR}/launch/config.proto ${PROJECT_SOURCE_DIR}/layers/model.proto
          ${PROJECT_SOURCE_DIR}/optim/optim.proto ${PROJECT_SOURCE_DIR}/runtime/schema.proto)
tessera_test(config_test SOURCES config_test.cc ${schema} LIBRARIES tessera_launch)
target_compile_definitions(config_test PRIVATE TESSERA_SCHEMA="${schema}")

tessera_test(metrics_test SOURCES metrics_test.cc
             LIBRARIES tessera_launch nlohmann_json::nlohmann_json)
