use std::{fmt, str::FromStr};

use burn::tensor::Device;
use vae_io::{DType, Error, Result};

/// A device by name: `auto`, `cpu`, `cuda`, `cuda:1`, `wgpu`, `wgpu:0`.
///
/// A number counts the devices of that kind as Burn lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The first of CUDA, a GPU through wgpu, the CPU that is built in and present.
    #[default]
    Auto,
    /// Burn's pure-Rust CPU backend.
    Cpu,
    /// An NVIDIA GPU.
    Cuda(usize),
    /// An adapter of wgpu; without a number the one that wgpu takes for the best.
    Wgpu(Option<usize>),
}

impl DeviceName {
    /// Opens the device, and says which one `auto` became.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] when it is not built in or not present.
    pub fn open(self) -> Result<(Device, Self)> {
        let device = match self {
            Self::Auto => return auto(),
            Self::Cpu => cpu(),
            Self::Cuda(index) => cuda(index),
            Self::Wgpu(index) => wgpu(index),
        };
        device.map(|device| (device, self))
    }

    /// The type that decodes best there: bf16 on CUDA, else f32.
    pub fn default_dtype(self) -> DType {
        match self {
            Self::Cuda(_) => DType::BF16,
            Self::Auto | Self::Cpu | Self::Wgpu(_) => DType::F32,
        }
    }

    fn unavailable(self, reason: impl Into<String>) -> Error {
        Error::DeviceUnavailable {
            device: self.to_string(),
            reason: reason.into(),
        }
    }

    #[cfg(not(all(feature = "flex", feature = "cuda", feature = "wgpu")))]
    fn not_built_in(self, feature: &str) -> Error {
        self.unavailable(format!("built without `{feature}`; rebuild with --features {feature}"))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Wgpu(None) => f.write_str("wgpu"),
            Self::Wgpu(Some(index)) => write!(f, "wgpu:{index}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let unknown = || format!("`{name}` is not a device; use auto, cpu, cuda, cuda:N, wgpu or wgpu:N");
        let (kind, index) = match name.split_once(':') {
            None => (name, None),
            Some((kind, index)) => (kind, Some(index.parse().map_err(|_| unknown())?)),
        };
        match (kind, index) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu", None) => Ok(Self::Cpu),
            ("cuda", index) => Ok(Self::Cuda(index.unwrap_or(0))),
            ("wgpu", index) => Ok(Self::Wgpu(index)),
            _ => Err(unknown()),
        }
    }
}

fn auto() -> Result<(Device, DeviceName)> {
    let candidates = [DeviceName::Cuda(0), DeviceName::Wgpu(None), DeviceName::Cpu];
    candidates
        .into_iter()
        .filter(|name| *name != DeviceName::Wgpu(None) || wgpu_has_a_gpu())
        .find_map(|name| name.open().ok())
        .ok_or_else(|| DeviceName::Auto.unavailable("no device was found; rebuild with --features flex for the CPU"))
}

#[cfg(feature = "flex")]
fn cpu() -> Result<Device> {
    Ok(Device::flex())
}

#[cfg(not(feature = "flex"))]
fn cpu() -> Result<Device> {
    Err(DeviceName::Cpu.not_built_in("flex"))
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Device> {
    use burn::tensor::DeviceType;

    let found = Device::enumerate(DeviceType::Cuda).len();
    if index >= found {
        let reason = format!("{found} CUDA devices found; check the NVIDIA driver (nvidia-smi) or pass --device cpu");
        return Err(DeviceName::Cuda(index).unavailable(reason));
    }
    Ok(Device::cuda(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(index: usize) -> Result<Device> {
    Err(DeviceName::Cuda(index).not_built_in("cuda"))
}

#[cfg(feature = "wgpu")]
fn wgpu(index: Option<usize>) -> Result<Device> {
    use burn::tensor::{DeviceKind, DeviceType};

    let devices = Device::enumerate(DeviceType::Wgpu).into_vec();
    let found = devices.len();
    let device = match index {
        None => (found > 0).then(|| Device::wgpu(DeviceKind::DefaultDevice)),
        Some(index) => devices.into_iter().nth(index),
    };
    device.ok_or_else(|| {
        let reason = format!("{found} adapters found; check the graphics driver or pass --device cpu");
        DeviceName::Wgpu(index).unavailable(reason)
    })
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(index: Option<usize>) -> Result<Device> {
    Err(DeviceName::Wgpu(index).not_built_in("wgpu"))
}

/// Software rasterizers are adapters too, but slower than Burn's own CPU backend.
#[cfg(feature = "wgpu")]
fn wgpu_has_a_gpu() -> bool {
    use burn::tensor::{DeviceKind, DeviceType};

    let found = Device::enumerate(DeviceType::Wgpu);
    [
        DeviceKind::DiscreteGpu(0),
        DeviceKind::IntegratedGpu(0),
        DeviceKind::VirtualGpu(0),
    ]
    .into_iter()
    .any(|kind| found.contains(&Device::wgpu(kind)))
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_has_a_gpu() -> bool {
    false
}

/// Bytes that the device's memory pools have reserved, or for the CPU the peak of the process's resident set. `None` where
/// the system does not tell.
///
/// Pools keep what they reserve, so right after a decode their size is close to its peak.
pub fn peak_memory(device: &Device) -> Option<u64> {
    match device.memory_pool_usage() {
        Some(usage) => Some(usage.bytes_reserved),
        None => peak_resident_set(),
    }
}

#[cfg(target_os = "linux")]
fn peak_resident_set() -> Option<u64> {
    kib_line("/proc/self/status", "VmHWM:")
}

/// A line of bytes in a file that counts in KiB.
#[cfg(target_os = "linux")]
fn kib_line(path: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes that this process can have in all: what it has, and what the system or its control group has left. `None` where the
/// system does not tell.
#[cfg(target_os = "linux")]
pub(crate) fn host_memory() -> Option<u64> {
    let resident = kib_line("/proc/self/status", "VmRSS:")?;
    let available = kib_line("/proc/meminfo", "MemAvailable:")?;
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max");
    let used = number("/sys/fs/cgroup/memory.current");
    let left = limit.zip(used).map(|(limit, used)| limit.saturating_sub(used));
    Some(resident + left.map_or(available, |left| left.min(available)))
}

/// Bytes that this process can have in all; unknown here.
#[cfg(not(target_os = "linux"))]
pub(crate) fn host_memory() -> Option<u64> {
    None
}

#[cfg(not(target_os = "linux"))]
fn peak_resident_set() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["auto", "cpu", "cuda:0", "cuda:3", "wgpu", "wgpu:1"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        for name in [
            "", "gpu", "cpu:0", "auto:1", "cuda:", "cuda:-1", "cuda:x", "wgpu:0:1", "CPU",
        ] {
            assert!(name.parse::<DeviceName>().is_err(), "{name}");
        }
    }

    #[test]
    fn a_cuda_device_that_is_not_there_is_an_error_not_a_panic() {
        let error = DeviceName::Cuda(99).open().unwrap_err().to_string();
        assert!(error.starts_with("device cuda:99 is not available: "), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_cpu_s_peak_is_at_least_what_was_allocated() {
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        assert!(peak_memory(&Device::flex()).unwrap() > block.len() as u64);
    }
}
