use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

/// Keeps compiled kernels in the user's cache folder, for the next run: a first decode on a GPU waits for their compiler.
///
/// CubeCL's own default keeps them nowhere. A `cubecl.toml` that names a place is respected.
pub fn persist() {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    CubeClRuntimeConfig::set(config);
}
