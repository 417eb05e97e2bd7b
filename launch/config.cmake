# The config, metrics and TensorBoard files of tessera_launch.
target_sources(tessera_launch PRIVATE config.cc metrics.cc tensorboard.cc)
tessera_protos(tessera_launch launch/config.proto launch/tensorboard.proto)
