# The config, metrics and TensorBoard files of tessera_launch.
target_sources(tessera_launch PRIVATE config.cc config_rules.cc config_text.cc metrics.cc tensorboard.cc)
tessera_protos(tessera_launch launch/config.proto launch/tensorboard.proto)
target_link_libraries(tessera_launch PUBLIC tessera_layers tessera_optim PRIVATE nlohmann_json::nlohmann_json)
target_compile_definitions(tessera_launch PRIVATE TESSERA_CONFIG_FOLDER="${PROJECT_SOURCE_DIR}/launch/configs")
