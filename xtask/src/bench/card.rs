//! Who a device is, and what NVIDIA's driver says of it.

use burn::tensor::Device;
use burn_vae::DeviceName;
use nvml_wrapper::{Nvml, enum_wrappers::device::Clock, error::NvmlError};

/// A device for a report: as it names itself, and through what it runs where that is not its own maker's way.
pub fn device_name(device: &Device, name: DeviceName) -> String {
    match name {
        DeviceName::Cpu => processor(),
        DeviceName::Wgpu(_) => format!("{}, wgpu", identity(device).map_or("adapter".into(), |(name, _)| name)),
        _ => identity(device).map_or_else(|| name.to_string(), |(name, _)| name),
    }
}

fn processor() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, model)| model.trim());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{model}, {cores} CPUs")
}

/// The name of a GPU and its address on the PCI bus.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn identity(device: &Device) -> Option<(String, Option<String>)> {
    let identity = device.identity()?;
    let address = identity.physical.and_then(|card| card.pci_address);
    Some((identity.name, address.map(|address| address.to_string())))
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn identity(_device: &Device) -> Option<(String, Option<String>)> {
    None
}

/// An NVIDIA card, as its driver's management library sees it.
pub struct Card {
    nvml: Nvml,
    bus_address: Option<String>,
}

impl Card {
    /// The card behind a device, if it is NVIDIA's and the library is there.
    pub fn of(device: &Device, name: DeviceName) -> Option<Self> {
        let (_, bus_address) = identity(device)?;
        if bus_address.is_none() && !matches!(name, DeviceName::Cuda(_)) {
            return None;
        }
        let card = Self {
            nvml: Nvml::init().ok()?,
            bus_address,
        };
        card.clock_mhz().is_some().then_some(card)
    }

    /// The driver's version.
    pub fn driver(&self) -> Option<String> {
        self.nvml.sys_driver_version().ok()
    }

    /// The clock of its multiprocessors right now.
    pub fn clock_mhz(&self) -> Option<u32> {
        self.handle().and_then(|card| card.clock_info(Clock::SM)).ok()
    }

    /// What the driver counts as used of its memory, by whomever.
    pub fn used_mib(&self) -> Option<f64> {
        let memory = self.handle().and_then(|card| card.memory_info()).ok()?;
        Some(memory.used as f64 / f64::from(1 << 20))
    }

    fn handle(&self) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        match &self.bus_address {
            Some(address) => self.nvml.device_by_pci_bus_id(address.as_str()),
            // Where the bus is hidden, one card is the one.
            None if self.nvml.device_count()? == 1 => self.nvml.device_by_index(0),
            None => Err(NvmlError::NotFound),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_a_name_and_no_card() {
        let device = Device::flex();
        assert!(device_name(&device, DeviceName::Cpu).ends_with(" CPUs"));
        assert!(Card::of(&device, DeviceName::Cpu).is_none());
    }
}
