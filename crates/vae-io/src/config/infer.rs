//! Configs of checkpoints that come without one.

use super::family::names;
use super::{DecoderConfig, Family, NORM_NUM_GROUPS, VaeConfig, ensure, unsupported};
use crate::{Checkpoint, Error, Result};

impl VaeConfig {
    /// A config for a checkpoint that has none: the layout from its tensors, the scaling from the family.
    ///
    /// The family can be left out only where the tensors tell, which is FLUX.2. The number of groups cannot be seen and
    /// is taken to be 32.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownFamily`] if several families fit and none is given; [`Error::UnsupportedConfig`] if the given
    /// one does not fit or the widths are not multiples of 32; [`Error::InvalidFile`] without the decoder's ends.
    pub fn infer(checkpoint: &Checkpoint, family: Option<Family>) -> Result<Self> {
        let inferred = DecoderConfig::infer(checkpoint)?;
        let channels = inferred.latent_channels;
        let batch_norm = checkpoint.keys().any(|key| key.starts_with("bn."));
        let beside = if batch_norm {
            " beside batch-norm statistics (bn.*)"
        } else {
            ""
        };
        let fits = |family: &Family| family.latent_channels() == channels && (!batch_norm || *family == Family::Flux2);
        let candidates: Vec<_> = Family::ALL.into_iter().filter(fits).collect();

        let family = match (family, candidates.as_slice()) {
            (_, []) => {
                let supported = "4, 16, or FLUX.2's 32 when there is no config";
                return Err(unsupported("latent_channels", format!("{channels}{beside}"), supported));
            }
            (Some(family), candidates) if candidates.contains(&family) => family,
            (Some(family), candidates) => {
                return Err(unsupported(
                    "family",
                    format!("{family} with {} latent channels", family.latent_channels()),
                    format!("{}: the checkpoint has {channels}{beside}", names(candidates)),
                ));
            }
            (None, &[family]) => family,
            (None, candidates) => {
                return Err(Error::UnknownFamily {
                    reason: format!("there is no config, and more than one has {channels} latent channels"),
                    candidates: names(candidates),
                });
            }
        };

        let mut config = Self::preset(family);
        let (decoder, use_post_quant_conv) = match &mut config {
            Self::AutoencoderKl(config) => (&mut config.decoder, &mut config.use_post_quant_conv),
            Self::Flux2(config) => (&mut config.decoder, &mut config.use_post_quant_conv),
        };
        *decoder = inferred;
        *use_post_quant_conv = checkpoint.get("post_quant_conv.weight").is_some();
        config.validate()?;
        Ok(config)
    }
}

impl DecoderConfig {
    /// Reads the layout off the tensors' names and shapes. What does not fit is left to the loader, which lists it all.
    fn infer(checkpoint: &Checkpoint) -> Result<Self> {
        let invalid = |reason: String| Error::invalid_file(checkpoint.path(), "VAE checkpoint", reason);
        let conv = |key: &str| match checkpoint.get(key).map(|tensor| tensor.shape) {
            Some(&[out, input, _, _]) => Ok((out, input)),
            Some(shape) => Err(invalid(format!(
                "`{key}` has shape {shape:?} instead of four dimensions"
            ))),
            None => Err(invalid(format!("it has no `{key}`"))),
        };
        let resnet = |block: usize, layer: usize| format!("decoder.up_blocks.{block}.resnets.{layer}.conv1.weight");
        let has = |key: &String| checkpoint.get(key).is_some();

        let (_, latent_channels) = conv("decoder.conv_in.weight")?;
        let (out_channels, _) = conv("decoder.conv_out.weight")?;
        let blocks = (0..).map(|block| resnet(block, 0)).take_while(has);
        let mut widths = blocks.map(|key| Ok(conv(&key)?.0)).collect::<Result<Vec<_>>>()?;
        widths.reverse();
        ensure(
            widths.iter().all(|width| width % NORM_NUM_GROUPS == 0),
            "norm_num_groups",
            format!("unknown: blocks of {widths:?} channels do not divide into {NORM_NUM_GROUPS} groups"),
            format!("{NORM_NUM_GROUPS}, or any other with --config FILE"),
        )?;
        let resnets = (0..).map(|layer| resnet(0, layer)).take_while(has).count();
        Ok(Self {
            latent_channels,
            out_channels,
            block_out_channels: widths,
            layers_per_block: resnets.saturating_sub(1),
            norm_num_groups: NORM_NUM_GROUPS,
            mid_block_add_attention: checkpoint
                .keys()
                .any(|key| key.starts_with("decoder.mid_block.attentions.")),
        })
    }
}
