use std::fmt;

use burn::tensor::DType;

use vae_ops::support::{ConvEngine, DeviceProfile};

use crate::{DecoderConfig, Error, Quality, Result};

/// What runs at every site of a decode: on one device, in one type, at one quality.
///
/// Made from plain values, so plans for any device can be made, compared and tested without it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The gate it was made for.
    pub quality: Quality,
    /// The device, as it names itself.
    pub device: String,
    /// The type of weights and activations.
    pub dtype: DType,
    /// In the order of execution.
    pub sites: Vec<SitePlan>,
}

/// A place in the decoder where work is done, and what does it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePlan {
    /// The place.
    pub site: Site,
    /// What was chosen.
    pub implementation: Implementation,
    /// Why nothing faster was.
    pub refused: Option<String>,
}

/// A place in the decoder where work is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Module path, as in the checkpoint's keys.
    pub path: String,
    /// What is computed there.
    pub operation: Operation,
}

/// What a site computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields count channels, named as everywhere")]
pub enum Operation {
    /// 1x1 convolution.
    Conv1x1 { channels_in: usize, channels_out: usize },
    /// 3x3 convolution, padding 1.
    Conv3x3 { channels_in: usize, channels_out: usize },
    /// Nearest-neighbour doubling, then a 3x3 convolution.
    UpsampleConv3x3 { channels: usize },
    /// Group normalisation, then SiLU.
    GroupNormSilu { channels: usize, groups: usize },
    /// Group normalisation, single-head attention over all pixels, residual.
    Attention { channels: usize },
}

/// Ways to run an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Implementation {
    /// Burn's own operations, one after another.
    Stock,
    /// Statistics and their application as one operation each, channels-last.
    FusedNorm,
    /// A convolution with bias and residual in its epilogue; an upsampling before it is folded into its weights.
    FusedConv(ConvEngine),
    /// Attention in chunks of queries, the output's projection folded into that of the values.
    FusedAttention(ConvEngine),
}

impl Plan {
    /// The plan of a decoder with `config`, and `post_quant_conv` before it if the model has one, on a device.
    ///
    /// # Errors
    /// [`Error::QualityUnavailable`] with the reasons, where the device or the type rules [`Quality::High`] out.
    pub fn new(
        config: &DecoderConfig,
        use_post_quant_conv: bool,
        device: &DeviceProfile,
        dtype: DType,
        quality: Quality,
    ) -> Result<Self> {
        if quality == Quality::High {
            let reasons = device.refusals(dtype);
            if !reasons.is_empty() {
                return Err(Error::QualityUnavailable {
                    quality: quality.name(),
                    reasons,
                });
            }
        }
        let sites = sites(config, use_post_quant_conv)
            .into_iter()
            .map(|site| match quality {
                Quality::Lossless => SitePlan {
                    site,
                    implementation: Implementation::Stock,
                    refused: None,
                },
                Quality::High => fused(site, device, dtype),
            });
        Ok(Self {
            quality,
            device: device.name.clone(),
            dtype,
            sites: sites.collect(),
        })
    }
}

/// The fastest fused implementation of a site.
fn fused(site: Site, device: &DeviceProfile, dtype: DType) -> SitePlan {
    let engine = |channels_in, channels_out| device.conv_engine(dtype, channels_in, channels_out);
    let (implementation, refused) = match site.operation {
        Operation::Conv1x1 {
            channels_in,
            channels_out,
        }
        | Operation::Conv3x3 {
            channels_in,
            channels_out,
        } => {
            let (engine, refused) = engine(channels_in, channels_out);
            (Implementation::FusedConv(engine), refused)
        }
        Operation::UpsampleConv3x3 { channels } => {
            let (engine, refused) = engine(channels, channels);
            (Implementation::FusedConv(engine), refused)
        }
        Operation::GroupNormSilu { .. } => (Implementation::FusedNorm, None),
        Operation::Attention { channels } => {
            let (engine, refused) = device.attention_engine(dtype, channels);
            (Implementation::FusedAttention(engine), refused)
        }
    };
    SitePlan {
        site,
        implementation,
        refused,
    }
}

/// The sites of a decoder in the order of execution.
fn sites(config: &DecoderConfig, use_post_quant_conv: bool) -> Vec<Site> {
    let groups = config.norm_num_groups;
    let mut sites = Vec::new();
    let mut push = |path: String, operation| sites.push(Site { path, operation });
    let resnet = |push: &mut dyn FnMut(String, Operation), path: &str, channels_in, channels_out| {
        for (i, channels) in [(1, channels_in), (2, channels_out)] {
            push(format!("{path}.norm{i}"), Operation::GroupNormSilu { channels, groups });
            let (channels_in, channels_out) = (channels, channels_out);
            push(
                format!("{path}.conv{i}"),
                Operation::Conv3x3 {
                    channels_in,
                    channels_out,
                },
            );
        }
        if channels_in != channels_out {
            push(
                format!("{path}.conv_shortcut"),
                Operation::Conv1x1 {
                    channels_in,
                    channels_out,
                },
            );
        }
    };

    let latents = config.latent_channels;
    let widest = config.block_out_channels[config.block_out_channels.len() - 1];
    if use_post_quant_conv {
        push(
            "post_quant_conv".into(),
            Operation::Conv1x1 {
                channels_in: latents,
                channels_out: latents,
            },
        );
    }
    push(
        "decoder.conv_in".into(),
        Operation::Conv3x3 {
            channels_in: latents,
            channels_out: widest,
        },
    );
    resnet(&mut push, "decoder.mid_block.resnets.0", widest, widest);
    if config.mid_block_add_attention {
        push(
            "decoder.mid_block.attentions.0".into(),
            Operation::Attention { channels: widest },
        );
    }
    resnet(&mut push, "decoder.mid_block.resnets.1", widest, widest);
    let blocks = config.block_out_channels.len();
    let mut channels = widest;
    for (i, &width) in config.block_out_channels.iter().rev().enumerate() {
        for j in 0..=config.layers_per_block {
            resnet(
                &mut push,
                &format!("decoder.up_blocks.{i}.resnets.{j}"),
                channels,
                width,
            );
            channels = width;
        }
        if i + 1 < blocks {
            let path = format!("decoder.up_blocks.{i}.upsamplers.0.conv");
            push(path, Operation::UpsampleConv3x3 { channels });
        }
    }
    push(
        "decoder.conv_norm_out".into(),
        Operation::GroupNormSilu { channels, groups },
    );
    push(
        "decoder.conv_out".into(),
        Operation::Conv3x3 {
            channels_in: channels,
            channels_out: config.out_channels,
        },
    );
    sites
}

impl fmt::Display for Plan {
    /// A head line, then a line a site.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "quality {}, device {}, {}, {} sites",
            self.quality,
            self.device,
            self.dtype.name(),
            self.sites.len()
        )?;
        self.sites.iter().try_for_each(|plan| {
            let SitePlan {
                site,
                implementation,
                refused,
            } = plan;
            let operation = site.operation.to_string();
            write!(f, "\n  {:<44} {operation:<30} {implementation}", site.path)?;
            match refused {
                Some(reason) => write!(f, " ({reason})"),
                None => Ok(()),
            }
        })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conv1x1 {
                channels_in,
                channels_out,
            } => write!(f, "conv 1x1 {channels_in}->{channels_out}"),
            Self::Conv3x3 {
                channels_in,
                channels_out,
            } => write!(f, "conv 3x3 {channels_in}->{channels_out}"),
            Self::UpsampleConv3x3 { channels } => write!(f, "upsample 2x, conv 3x3 {channels}"),
            Self::GroupNormSilu { channels, groups } => write!(f, "group norm {channels}/{groups}, silu"),
            Self::Attention { channels } => write!(f, "attention, one head of {channels}"),
        }
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stock => f.write_str("stock Burn operations"),
            Self::FusedNorm => f.write_str("fused, two passes"),
            Self::FusedConv(engine) => write!(f, "fused, {engine}"),
            Self::FusedAttention(engine) => write!(f, "folded, in chunks, {engine}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use burn::{
        module::{Module, ModuleVisitor, Param},
        tensor::{Device, Tensor},
    };

    use vae_ops::support::{GpuProfile, Runtime};

    use super::*;
    use crate::Decoder;

    fn small(layers_per_block: usize, attention: bool) -> DecoderConfig {
        DecoderConfig {
            latent_channels: 4,
            out_channels: 3,
            block_out_channels: vec![16, 32],
            layers_per_block,
            norm_num_groups: 8,
            mid_block_add_attention: attention,
        }
    }

    fn paths(config: &DecoderConfig, post_quant_conv: bool) -> Vec<String> {
        sites(config, post_quant_conv)
            .into_iter()
            .map(|site| site.path)
            .collect()
    }

    #[test]
    fn every_layer_of_a_small_decoder_is_a_site() {
        let sites = sites(&small(1, true), true);
        let found: Vec<_> = sites
            .iter()
            .map(|site| (site.path.as_str(), site.operation.to_string()))
            .collect();
        assert_eq!(found[0], ("post_quant_conv", "conv 1x1 4->4".into()));
        assert_eq!(found[1], ("decoder.conv_in", "conv 3x3 4->32".into()));
        assert_eq!(
            found[6],
            ("decoder.mid_block.attentions.0", "attention, one head of 32".into())
        );
        let shortcut = ("decoder.up_blocks.1.resnets.0.conv_shortcut", "conv 1x1 32->16".into());
        assert!(found.contains(&shortcut));
        let upsample = (
            "decoder.up_blocks.0.upsamplers.0.conv",
            "upsample 2x, conv 3x3 32".into(),
        );
        assert!(found.contains(&upsample));
        assert_eq!(found[found.len() - 1], ("decoder.conv_out", "conv 3x3 16->3".into()));
        // 3 outer convolutions, 1 norm, 2 + 4 resnets of 4 sites, a shortcut, an attention, an upsampler.
        assert_eq!(found.len(), 3 + 1 + 6 * 4 + 3);
    }

    #[test]
    fn what_a_config_leaves_out_is_no_site() {
        let all = paths(&small(1, true), true);
        let without = paths(&small(1, false), false);
        assert_eq!(without.len(), all.len() - 2);
        assert!(
            without
                .iter()
                .all(|path| !path.contains("attentions") && path != "post_quant_conv")
        );
        assert_eq!(paths(&small(2, false), false).len(), without.len() + 2 * 4);
    }

    /// `sites` is a second description of the decoder; this keeps it true to the first.
    #[test]
    fn sites_are_the_layers_of_the_module() {
        #[derive(Default)]
        struct Layers {
            path: Vec<String>,
            found: BTreeSet<String>,
        }
        impl ModuleVisitor for Layers {
            fn enter_module(&mut self, name: &str, _container_type: &str) {
                self.path.push(name.to_string());
            }
            fn exit_module(&mut self, _name: &str, _container_type: &str) {
                self.path.pop();
            }
            fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
                let mut layer = &self.path[..self.path.len() - 1];
                // All layers of an attention block are one site.
                if let Some(block) = layer.iter().position(|name| name == "attentions") {
                    layer = &layer[..block + 2];
                }
                self.found.insert(format!("decoder.{}", layer.join(".")));
            }
        }
        for config in [small(1, true), small(2, false)] {
            let mut layers = Layers::default();
            Decoder::new(&config, &Device::flex()).visit(&mut layers);
            let sites: BTreeSet<String> = paths(&config, false).into_iter().collect();
            assert_eq!(sites, layers.found);
        }
    }

    const F16: DType = DType::F16;
    const BF16: DType = DType::BF16;

    fn profile(name: &str, runtime: Runtime, dtypes: &[DType]) -> DeviceProfile {
        DeviceProfile {
            name: name.to_string(),
            runtime,
            autodiff: false,
            dtypes: dtypes.to_vec(),
        }
    }

    fn h200() -> GpuProfile {
        GpuProfile {
            plane_sizes: (32, 32),
            max_units: 1024,
            shared_memory: 232_448,
            tensor_core_dtypes: vec![F16, BF16],
            multiprocessors: 132,
            sm_90a: true,
        }
    }

    fn engines(device: &DeviceProfile, dtype: DType) -> Vec<(String, Implementation, Option<String>)> {
        let plan = Plan::new(&small(1, true), true, device, dtype, Quality::High).unwrap();
        let row = |plan: SitePlan| (plan.site.path, plan.implementation, plan.refused);
        plan.sites.into_iter().map(row).collect()
    }

    #[test]
    fn an_h200_runs_its_own_kernel_where_the_channels_allow() {
        let device = profile("cuda", Runtime::Gpu(h200()), &[DType::F32, F16, BF16]);
        let sites = engines(&device, BF16);
        let of = |path: &str| sites.iter().find(|site| site.0 == path).unwrap().clone();
        let (_, conv, refused) = of("decoder.mid_block.resnets.0.conv1");
        assert_eq!((conv, refused), (Implementation::FusedConv(ConvEngine::Hopper), None));
        assert_eq!(of("decoder.conv_out").1, Implementation::FusedConv(ConvEngine::Hopper));
        // 4 channels in.
        let (_, conv, refused) = of("decoder.conv_in");
        assert_eq!(conv, Implementation::FusedConv(ConvEngine::TensorCore));
        assert!(refused.unwrap().contains("multiples of 8 channels"));
        assert_eq!(of("decoder.conv_norm_out").1, Implementation::FusedNorm);
        let (_, conv, refused) = engines(&device, DType::F32).swap_remove(1);
        assert_eq!(conv, Implementation::FusedConv(ConvEngine::MultiplyAdd));
        assert_eq!(refused.as_deref(), Some("tensor cores would round f32"));
    }

    /// A full-size decoder, `(latent channels, widths)`.
    fn full_size(latent_channels: usize, block_out_channels: [usize; 4]) -> DecoderConfig {
        DecoderConfig {
            latent_channels,
            out_channels: 3,
            block_out_channels: block_out_channels.to_vec(),
            layers_per_block: 2,
            norm_num_groups: 32,
            mid_block_add_attention: true,
        }
    }

    /// Sites of a plan whose fastest implementation was refused, with the reasons.
    fn refused(plan: &Plan) -> Vec<(&str, &str)> {
        let refusals = plan.sites.iter();
        refusals
            .filter_map(|plan| Some((plan.site.path.as_str(), plan.refused.as_deref()?)))
            .collect()
    }

    #[test]
    fn an_h200_refuses_only_the_sites_of_sd_with_four_channels() {
        let device = profile("cuda", Runtime::Gpu(h200()), &[DType::F32, F16, BF16]);
        let plan = |config: &DecoderConfig| Plan::new(config, true, &device, BF16, Quality::High).unwrap();
        // FLUX.2, its small decoder with attention of 384, FLUX.1.
        for (latents, widths) in [
            (32, [128, 256, 512, 512]),
            (32, [96, 192, 384, 384]),
            (16, [128, 256, 512, 512]),
        ] {
            assert_eq!(refused(&plan(&full_size(latents, widths))), []);
        }
        let plan = plan(&full_size(4, [128, 256, 512, 512]));
        let four = |to: usize| format!("the sm_90a kernels take multiples of 8 channels, not 4 to {to}");
        let expected = [("post_quant_conv", four(4)), ("decoder.conv_in", four(512))];
        assert_eq!(
            refused(&plan),
            expected.each_ref().map(|(path, reason)| (*path, reason.as_str()))
        );
        // What `decode --explain` prints.
        let text = plan.to_string();
        assert!(text.starts_with("quality high, device cuda, bf16, "), "{text}");
        let line = |path: &str| {
            text.lines()
                .find(|line| line.trim_start().starts_with(path))
                .unwrap()
                .trim_end()
        };
        let conv_in = line("decoder.conv_in");
        assert!(
            conv_in.ends_with(&format!("fused, tensor cores ({})", four(512))),
            "{conv_in}"
        );
        let conv_out = line("decoder.conv_out");
        assert!(conv_out.ends_with("fused, sm_90a kernel"), "{conv_out}");
        let attention = line("decoder.mid_block.attentions.0");
        assert!(attention.ends_with("folded, in chunks, sm_90a kernel"), "{attention}");
    }

    #[test]
    fn attention_of_a_width_that_is_none_of_the_sm_90a_kernels_is_refused_alone() {
        let device = profile("cuda", Runtime::Gpu(h200()), &[DType::F32, F16, BF16]);
        for widest in [96, 1024] {
            let config = full_size(16, [128, 256, 256, widest]);
            let plan = Plan::new(&config, false, &device, F16, Quality::High).unwrap();
            let reason = format!("the sm_90a kernels take multiples of 64 channels up to 512, not {widest}");
            assert_eq!(refused(&plan), [("decoder.mid_block.attentions.0", reason.as_str())]);
        }
    }

    /// Refused at every site but the norms, for one reason.
    #[test]
    fn an_ampere_runs_tensor_cores_and_says_why_not_the_hopper_kernel() {
        let gpu = GpuProfile {
            shared_memory: 101_376,
            sm_90a: false,
            ..h200()
        };
        let device = profile("cuda", Runtime::Gpu(gpu), &[DType::F32, F16, BF16]);
        for dtype in [F16, BF16] {
            for (path, implementation, refused) in engines(&device, dtype) {
                match implementation {
                    Implementation::FusedNorm => assert_eq!(refused, None, "{path}"),
                    Implementation::FusedConv(engine) | Implementation::FusedAttention(engine) => {
                        assert_eq!(engine, ConvEngine::TensorCore, "{path}");
                        let reason = "the sm_90a kernels need an NVIDIA sm_90 and a build with `hopper`";
                        assert_eq!(refused.as_deref(), Some(reason), "{path}");
                    }
                    Implementation::Stock => panic!("{path} is stock"),
                }
            }
        }
    }

    /// What `decode --explain` prints of a device where one reason holds everywhere.
    #[test]
    fn a_plan_prints_the_reason_at_every_site_it_holds_for() {
        let device = profile("cuda", Runtime::Gpu(h200()), &[DType::F32, F16, BF16]);
        let plan = Plan::new(&small(1, true), true, &device, DType::F32, Quality::High).unwrap();
        let text = plan.to_string();
        let sites: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(sites.len(), plan.sites.len());
        for line in sites {
            let norm = line.contains("group norm");
            let ending = if norm {
                "fused, two passes"
            } else {
                "multiply-adds (tensor cores would round f32)"
            };
            assert!(line.ends_with(ending), "{line}");
        }
        let lossless = Plan::new(&small(1, true), true, &device, DType::F32, Quality::Lossless).unwrap();
        for line in lossless.to_string().lines().skip(1) {
            assert!(line.ends_with("stock Burn operations"), "{line}");
        }
    }

    #[test]
    fn a_device_without_tensor_cores_multiplies_and_adds() {
        let gpu = GpuProfile {
            plane_sizes: (8, 8),
            shared_memory: 32_768,
            tensor_core_dtypes: Vec::new(),
            sm_90a: false,
            ..h200()
        };
        let device = profile("vulkan", Runtime::Gpu(gpu.clone()), &[DType::F32, F16]);
        for (_, implementation, refused) in engines(&device, F16) {
            match implementation {
                Implementation::FusedNorm => assert_eq!(refused, None),
                Implementation::FusedConv(engine) | Implementation::FusedAttention(engine) => {
                    assert_eq!(engine, ConvEngine::MultiplyAdd);
                    assert!(refused.unwrap().contains("no tensor cores"));
                }
                Implementation::Stock => panic!("a stock site"),
            }
        }
        // Planes that are not 32 wide rule the tensor-core kernel out.
        let gpu = GpuProfile {
            shared_memory: 65_536,
            tensor_core_dtypes: vec![F16],
            ..gpu
        };
        let device = profile("vulkan", Runtime::Gpu(gpu), &[DType::F32, F16]);
        let (_, _, refused) = engines(&device, F16).swap_remove(3);
        assert!(refused.unwrap().contains("planes of 32"));
    }

    #[test]
    fn the_cpu_runs_its_own_loops() {
        for (_, implementation, refused) in engines(&profile("cpu", Runtime::Cpu, &[DType::F32]), DType::F32) {
            assert!(implementation != Implementation::Stock && refused.is_none());
        }
    }

    /// Refused as a whole, with every reason, and never replaced by Lossless.
    #[test]
    fn high_is_refused_where_it_cannot_run() {
        let refused = |device: &DeviceProfile, dtype| {
            Plan::new(&small(1, true), true, device, dtype, Quality::Lossless).unwrap();
            let error = Plan::new(&small(1, true), true, device, dtype, Quality::High).unwrap_err();
            let Error::QualityUnavailable { reasons, .. } = error else {
                panic!("{error}")
            };
            reasons
        };
        let lavapipe = GpuProfile {
            tensor_core_dtypes: Vec::new(),
            sm_90a: false,
            ..h200()
        };
        let mut device = profile("vulkan", Runtime::Gpu(lavapipe), &[DType::F32]);
        assert_eq!(refused(&device, BF16), ["vulkan does not compute in bf16"]);
        device.autodiff = true;
        assert_eq!(refused(&device, BF16).len(), 2);
        assert!(refused(&device, DType::F32)[0].contains("no gradient"));
        let other = profile("tch", Runtime::Other, &[DType::F32]);
        assert!(refused(&other, DType::F32)[0].contains("no fused operations"));
        let small = GpuProfile {
            max_units: 128,
            ..h200()
        };
        let small = profile("small", Runtime::Gpu(small), &[DType::F32]);
        assert!(refused(&small, DType::F32)[0].contains("128 units"));
    }
}
