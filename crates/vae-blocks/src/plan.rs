use std::fmt;

use burn::tensor::DType;

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
}

impl Plan {
    /// The plan of a decoder with `config`, and `post_quant_conv` before it if the model has one, on a device.
    ///
    /// # Errors
    /// [`Error::QualityUnavailable`] with the reasons, for [`Quality::High`] in this version.
    pub fn new(
        config: &DecoderConfig,
        use_post_quant_conv: bool,
        device: impl Into<String>,
        dtype: DType,
        quality: Quality,
    ) -> Result<Self> {
        let sites = sites(config, use_post_quant_conv);
        match quality {
            Quality::Lossless => Ok(Self {
                quality,
                device: device.into(),
                dtype,
                sites: sites
                    .into_iter()
                    .map(|site| SitePlan {
                        site,
                        implementation: Implementation::Stock,
                    })
                    .collect(),
            }),
            Quality::High => Err(Error::QualityUnavailable {
                quality: quality.name(),
                reasons: vec![format!(
                    "this version has no fused operation for any of the {} sites, pass --quality lossless",
                    sites.len()
                )],
            }),
        }
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
            let SitePlan { site, implementation } = plan;
            write!(
                f,
                "\n  {:<44} {:<30} {implementation}",
                site.path,
                site.operation.to_string()
            )
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

    #[test]
    fn high_is_refused_with_a_reason_instead_of_running_lossless() {
        let error = Plan::new(&small(1, true), true, "cpu", DType::F32, Quality::High).unwrap_err();
        assert!(
            error.to_string().starts_with("quality high is not available: "),
            "{error}"
        );
    }
}
