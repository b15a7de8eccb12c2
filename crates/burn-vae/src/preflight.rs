//! Whether a decode fits, and how it has to be cut.

use std::num::NonZeroUsize;

use vae_blocks::{
    DecodeCase, DeviceLimits, DeviceProfile, MemoryEstimate, Quality, Runtime, Storage, TilePlan, VaeModel,
};
use vae_io::{Error, Result};

use crate::{DecodeOptions, Preflight, Tiling, host_memory};

/// The memory of decodes of one size.
pub(crate) struct Forecaster<'m> {
    pub model: &'m dyn VaeModel,
    pub device: &'m DeviceProfile,
    pub limits: DeviceLimits,
    pub quality: Quality,
    /// Images, and height and width of the latents in VAE space.
    pub size: [usize; 3],
    /// Whether the folded weights exist.
    pub folded: bool,
}

impl Forecaster<'_> {
    /// What a decode will run as.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where it does not fit.
    pub fn preflight(&self, options: &DecodeOptions<'_>) -> Result<Preflight> {
        let budget = self.budget(options.max_memory);
        let storage = options.storage.unwrap_or_default();
        let tiling = options.tiling.unwrap_or(match self.quality {
            Quality::High => Tiling::Auto,
            Quality::Lossless => Tiling::Off,
        });
        let rows = match tiling {
            Tiling::Off => None,
            Tiling::Rows(rows) => Some(rows),
            Tiling::Auto => {
                return self.highest(&budget, options.storage).ok_or_else(|| {
                    let least = TilePlan {
                        rows: Some(NonZeroUsize::MIN),
                        storage,
                    };
                    self.refusal(least, &budget, options)
                });
            }
        };
        let tile = TilePlan { rows, storage };
        self.fitting(tile, &budget)
            .ok_or_else(|| self.refusal(tile, &budget, options))
    }

    fn is_gpu(&self) -> bool {
        matches!(self.device.runtime, Runtime::Gpu(_))
    }

    fn budget(&self, max_memory: Option<u64>) -> Budget {
        let host = host_memory();
        match self.is_gpu() {
            true => Budget {
                device: max_memory.or(self.limits.memory),
                host,
                is_asked: max_memory.is_some(),
            },
            false => Budget {
                device: None,
                host: max_memory.or(host),
                is_asked: max_memory.is_some(),
            },
        }
    }

    fn estimate(&self, tile: TilePlan) -> MemoryEstimate {
        let case = DecodeCase {
            quality: self.quality,
            dtype: self.model.dtype(),
            size: self.size,
            tile,
            folded: self.folded,
        };
        MemoryEstimate::new(self.model, self.device, case)
    }

    fn fitting(&self, tile: TilePlan, budget: &Budget) -> Option<Preflight> {
        let memory = self.estimate(tile);
        self.excess(&memory, budget).is_none().then_some(Preflight {
            tile,
            memory,
            budget: if self.is_gpu() { budget.device } else { budget.host },
        })
    }

    /// What the decode has too much of.
    fn excess(&self, memory: &MemoryEstimate, budget: &Budget) -> Option<Excess> {
        let over = |needed: u64, limit: Option<u64>| limit.filter(|&limit| needed > limit);
        if let Some(limit) = over(memory.largest_tensor, self.limits.elements) {
            return Some(Excess::Elements(memory.largest_tensor, limit));
        }
        if let Some(limit) = over(memory.largest_buffer, self.limits.buffer) {
            return Some(Excess::Buffer(memory.largest_buffer, limit));
        }
        if let Some(limit) = over(memory.device, budget.device) {
            return Some(Excess::Device(memory.device, limit));
        }
        over(memory.host, budget.host).map(|limit| Excess::Host(memory.host, limit))
    }

    /// All rows at once, else the highest bands that fit; without a storage asked for, on the device, else for a GPU on the host.
    fn highest(&self, budget: &Budget, storage: Option<Storage>) -> Option<Preflight> {
        let storages = match storage {
            Some(storage) => vec![storage],
            None if self.is_gpu() => vec![Storage::Device, Storage::Host],
            None => vec![Storage::Device],
        };
        let whole = TilePlan {
            rows: None,
            storage: storages[0],
        };
        self.fitting(whole, budget).or_else(|| {
            storages
                .into_iter()
                .find_map(|storage| self.highest_bands(budget, storage))
        })
    }

    fn highest_bands(&self, budget: &Budget, storage: Storage) -> Option<Preflight> {
        let height = self.size[1];
        band_heights(height).into_iter().rev().find_map(|rows| {
            let tile = TilePlan {
                rows: Some(rows),
                storage,
            };
            self.fitting(tile, budget)
        })
    }

    fn refusal(&self, tile: TilePlan, budget: &Budget, options: &DecodeOptions<'_>) -> Error {
        let [batch, height, width] = self.size;
        let scale = self.model.decoder_config().upscale();
        let size = format!("{}x{}", width.saturating_mul(scale), height.saturating_mul(scale));
        let images = match batch {
            1 => size,
            _ => format!("{batch} images of {size}"),
        };
        let memory = self.estimate(tile);
        let (needed, of, available) = match self.excess(&memory, budget) {
            Some(Excess::Elements(needed, limit)) => (
                format!("a tensor of {needed} elements"),
                self.device.name.clone(),
                format!("its kernels count to {limit}"),
            ),
            Some(Excess::Buffer(needed, limit)) => (
                format!("a buffer of {}", mib(needed)),
                self.device.name.clone(),
                format!("its buffers end at {}", mib(limit)),
            ),
            Some(Excess::Device(needed, limit)) => (mib(needed), self.device.name.clone(), budget.there_are(limit)),
            Some(Excess::Host(needed, limit)) => (mib(needed), "the host".to_string(), budget.there_are(limit)),
            // Bands that fit are not refused.
            None => (mib(memory.host), "the host".to_string(), "it would fit".to_string()),
        };
        Error::OutOfMemory {
            decode: format!("decoding {images} with {tile}"),
            needed,
            memory: of,
            available,
            suggestion: self.suggestion(budget, options),
        }
    }

    /// The flags that would fit.
    fn suggestion(&self, budget: &Budget, options: &DecodeOptions<'_>) -> String {
        if let Some(fitting) = self.highest(budget, options.storage) {
            return match fitting.tile.storage {
                storage if Some(storage) == options.storage || storage == Storage::Device => {
                    "pass --tile auto".to_string()
                }
                storage => format!("pass --tile auto --storage {storage}"),
            };
        }
        let others = [Storage::Half, Storage::Disk].into_iter();
        if let Some(fitting) = others
            .filter(|&storage| Some(storage) != options.storage)
            .find_map(|storage| self.highest_bands(budget, storage))
        {
            return format!("pass --tile auto --storage {}", fitting.tile.storage);
        }
        let least = TilePlan {
            rows: Some(NonZeroUsize::MIN),
            storage: Storage::Disk,
        };
        format!(
            "bands of one row on disk would take {}; decode a smaller image, or with more memory",
            self.estimate(least)
        )
    }
}

/// Memory that a decode has to fit into.
struct Budget {
    device: Option<u64>,
    host: Option<u64>,
    /// By the caller.
    is_asked: bool,
}

impl Budget {
    fn there_are(&self, limit: u64) -> String {
        match self.is_asked {
            true => format!("{} are allowed", mib(limit)),
            false => format!("{} are there", mib(limit)),
        }
    }
}

/// What is needed, and what there is.
enum Excess {
    Elements(u64, u64),
    Buffer(u64, u64),
    Device(u64, u64),
    Host(u64, u64),
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Heights of bands worth trying below `height`: 1, 2, 3, 4, 6, 8, 12, ...
fn band_heights(height: usize) -> Vec<NonZeroUsize> {
    let powers = (0..usize::BITS)
        .map(|power| 1usize << power)
        .take_while(|&rows| rows < height);
    powers
        .flat_map(|rows| [rows, rows + rows / 2])
        .filter(|&rows| rows < height.max(2))
        .filter_map(NonZeroUsize::new)
        .fold(Vec::new(), |mut heights, rows| {
            if heights.last() != Some(&rows) {
                heights.push(rows);
            }
            heights
        })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType as BurnDType, Device, FloatDType};
    use flux2::{AutoencoderKlFlux2, Flux2Config};
    use vae_blocks::GpuProfile;

    use super::*;

    fn h200() -> DeviceProfile {
        DeviceProfile {
            name: "H200".to_string(),
            runtime: Runtime::Gpu(GpuProfile {
                plane_sizes: (32, 32),
                max_units: 1024,
                shared_memory: 227 << 10,
                tensor_core_dtypes: vec![BurnDType::F16, BurnDType::BF16],
                multiprocessors: 132,
                sm_90a: true,
            }),
            autodiff: false,
            dtypes: vec![BurnDType::F32, BurnDType::F16, BurnDType::BF16],
        }
    }

    #[test]
    fn what_an_h200_was_measured_to_reserve_is_predicted() {
        let flux2 = Flux2Config::flux2();
        let small = Flux2Config::small();
        // docs/performance.md
        for (config, pixels, measured) in [
            (&flux2, 512, 658),
            (&flux2, 1024, 1426),
            (&flux2, 2048, 4511),
            (&small, 512, 420),
            (&small, 1024, 1004),
            (&small, 2048, 3316),
        ] {
            let model = AutoencoderKlFlux2::new(config, &Device::flex());
            let case = DecodeCase {
                quality: Quality::High,
                dtype: FloatDType::BF16,
                size: [1, pixels / 8, pixels / 8],
                tile: TilePlan::default(),
                folded: false,
            };
            let estimate = MemoryEstimate::new(&model, &h200(), case);
            let predicted = estimate.device >> 20;
            println!(
                "{pixels}: {predicted} MiB for {measured}, buffers up to {}",
                estimate.largest_buffer >> 20
            );
            assert!(
                (measured..=measured * 6 / 5).contains(&predicted),
                "{pixels}: {predicted} MiB for {measured}"
            );
        }
    }

    /// A decode of FLUX.2 on an H200 that may take so many MiB.
    fn on_h200(pixels: usize, max_memory: Option<u64>, tiling: Tiling, storage: Option<Storage>) -> Result<Preflight> {
        let model = AutoencoderKlFlux2::new(&Flux2Config::flux2(), &Device::flex());
        let forecaster = Forecaster {
            model: &model,
            device: &h200(),
            limits: DeviceLimits {
                memory: Some(140 << 30),
                buffer: Some(35 << 30),
                elements: Some(i32::MAX as u64),
            },
            quality: Quality::High,
            size: [1, pixels / 8, pixels / 8],
            folded: false,
        };
        forecaster.preflight(&DecodeOptions {
            quality: Quality::High,
            tiling: Some(tiling),
            storage,
            max_memory: max_memory.map(|mib| mib << 20),
            progress: None,
        })
    }

    #[test]
    fn auto_takes_all_rows_then_the_highest_bands_then_the_host() {
        let plan = |pixels, max_memory| on_h200(pixels, max_memory, Tiling::Auto, None).unwrap();
        assert_eq!(plan(1024, None).tile, TilePlan::default());
        let bands = plan(1024, Some(2500));
        assert!(
            bands.tile.rows.is_some() && bands.tile.storage == Storage::Device,
            "{bands:?}"
        );
        assert!(bands.memory.device <= 2500 << 20);
        let host = plan(1024, Some(1800));
        assert!(
            host.tile.rows.is_some() && host.tile.storage == Storage::Host,
            "{host:?}"
        );
        assert!(host.memory.device <= 1800 << 20);
        // More elements in an activation than kernels count, and more bytes than a buffer has.
        let large = plan(8192, None);
        assert!(large.tile.rows.is_some(), "{large:?}");
        println!(
            "{} {}\n{} {}\n{} {}",
            bands.tile, bands.memory, host.tile, host.memory, large.tile, large.memory
        );
    }

    #[test]
    fn a_refusal_names_the_numbers_and_the_flag_that_fits() {
        let text = |max_memory, tiling, storage| {
            on_h200(1024, Some(max_memory), tiling, storage)
                .unwrap_err()
                .to_string()
        };
        let whole = text(1500, Tiling::Off, None);
        assert!(
            whole.contains("1024x1024") && whole.contains("1500 MiB are allowed"),
            "{whole}"
        );
        assert!(
            whole.ends_with("pass --tile auto") || whole.ends_with("--storage host"),
            "{whole}"
        );
        let least = text(100, Tiling::Auto, None);
        assert!(least.contains("decode a smaller image"), "{least}");
        let elements = on_h200(8192, None, Tiling::Off, None).unwrap_err().to_string();
        assert!(
            elements.contains("elements") && elements.ends_with("pass --tile auto"),
            "{elements}"
        );
    }

    #[test]
    fn heights_below_that_of_the_image_are_tried() {
        let heights = |height| {
            band_heights(height)
                .into_iter()
                .map(NonZeroUsize::get)
                .collect::<Vec<_>>()
        };
        assert_eq!(heights(1), [0usize; 0]);
        assert_eq!(heights(2), [1]);
        assert_eq!(heights(17), [1, 2, 3, 4, 6, 8, 12, 16]);
    }
}
