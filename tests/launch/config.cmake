# The schema with its comments, which the compiled descriptors lack.
set(schema ${CMAKE_CURRENT_BINARY_DIR}/schema.descriptors)
add_custom_command(
  OUTPUT ${schema}
  COMMAND protobuf::protoc --descriptor_set_out=${schema} --include_imports --include_source_info
          -I ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/launch/config.proto
  DEPENDS ${PROJECT_SOURCE_DIR}/launch/config.proto ${PROJECT_SOURCE_DIR}/layers/model.proto
          ${PROJECT_SOURCE_DIR}/optim/optim.proto ${PROJECT_SOURCE_DIR}/runtime/schema.proto)
tessera_test(config_test SOURCES config_test.cc ${schema} LIBRARIES tessera_config)
target_compile_definitions(config_test PRIVATE TESSERA_SCHEMA="${schema}")

tessera_test(metrics_test SOURCES metrics_test.cc
             LIBRARIES tessera_metrics nlohmann_json::nlohmann_json)

# TensorBoard itself, from PyPI into the build's folder, reads what metrics_test left; where PyPI
# doesn't answer it says so and is skipped.
add_test(NAME tensorboard_reads
         COMMAND /usr/bin/python3 ${CMAKE_CURRENT_SOURCE_DIR}/tensorboard_reads.py
                 ${PROJECT_BINARY_DIR}/tests/tensorboard_sample)
set_tests_properties(metrics_test PROPERTIES FIXTURES_SETUP tensorboard_sample)
set_tests_properties(tensorboard_reads PROPERTIES FIXTURES_REQUIRED tensorboard_sample
                     SKIP_RETURN_CODE 77 TIMEOUT 300)
