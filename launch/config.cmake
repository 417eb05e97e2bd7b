# What needs nothing of a run, as libraries of their own: the config, and the metrics and TensorBoard
# files.
add_library(tessera_config STATIC config.cc config_rules.cc config_text.cc)
tessera_protos(tessera_config launch/config.proto)
target_link_libraries(tessera_config PUBLIC tessera_data tessera_layers tessera_optim)
target_compile_definitions(tessera_config PRIVATE TESSERA_CONFIG_FOLDER="${PROJECT_SOURCE_DIR}/launch/configs")

add_library(tessera_metrics STATIC appended_file.cc metrics.cc tensorboard.cc)
tessera_protos(tessera_metrics launch/tensorboard.proto)
target_link_libraries(tessera_metrics PUBLIC tessera_data PRIVATE nlohmann_json::nlohmann_json)

target_link_libraries(tessera_launch PUBLIC tessera_config tessera_metrics)
