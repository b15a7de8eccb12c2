use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

/// Keeps compiled kernels and the choices of autotune in the user's cache folder, for the next run.
///
/// A first decode on a GPU spends most of its time on them. CubeCL's own default keeps the choices under the current
/// folder and the kernels nowhere. A `cubecl.toml` that names a place is respected.
pub fn persist() {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    CubeClRuntimeConfig::set(config);
}
