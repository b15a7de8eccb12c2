//! The names that a decoder's tensors go by, and diffusers' present ones for them.

/// What full checkpoints put before the VAE's keys: LDM's, and the single files of newer tools.
const PREFIXES: [&str; 2] = ["first_stage_model.", "vae."];

/// Up blocks of the decoder that these keys belong to: one more than the highest index in either style.
///
/// LDM numbers the blocks from the image, diffusers from the latents, so names alone cannot be translated.
pub(super) fn count_up_blocks<'a>(sources: impl IntoIterator<Item = &'a str>) -> usize {
    let block = |source: &'a str| {
        let mut parts = strip_prefix(source).strip_prefix("decoder.")?.split('.');
        let index = parts
            .next()
            .filter(|part| matches!(*part, "up" | "up_blocks"))
            .and(parts.next())?;
        Some(parse_index(index)? + 1)
    };
    sources.into_iter().filter_map(block).max().unwrap_or(0)
}

/// Diffusers' name of a tensor that belongs to a decoder, or `None` for everything else in a checkpoint.
///
/// Tensors inside the decoder that no known model has keep their name, so that callers can report them.
pub(super) fn canonical(source: &str, up_blocks: usize) -> Option<String> {
    let key = strip_prefix(source);
    if key == "bn.num_batches_tracked" {
        return None; // a counter of the training
    }
    if key.starts_with("post_quant_conv.") || key.starts_with("bn.") {
        return Some(key.to_owned());
    }
    let inside = key.strip_prefix("decoder.")?;
    if inside.starts_with("post_quant_conv.") {
        return Some(inside.to_owned()); // FLUX.2 as Black Forest Labs stores it
    }
    Some(translated(inside, up_blocks).map_or_else(|| key.to_owned(), |name| format!("decoder.{name}")))
}

/// Whether the tensor is a matrix of the attention layer, which LDM stores as a 1x1 convolution.
pub(super) fn is_attention_matrix(canonical: &str) -> bool {
    let layer = canonical.strip_prefix("decoder.mid_block.attentions.0.");
    matches!(
        layer,
        Some("to_q.weight" | "to_k.weight" | "to_v.weight" | "to_out.0.weight")
    )
}

fn strip_prefix(source: &str) -> &str {
    PREFIXES
        .iter()
        .find_map(|prefix| source.strip_prefix(prefix))
        .unwrap_or(source)
}

/// The table of models: LDM's and old diffusers' names to the present ones; `None` if there is nothing to translate.
fn translated(inside: &str, up_blocks: usize) -> Option<String> {
    let from_the_end = |index: &str| up_blocks.checked_sub(1)?.checked_sub(parse_index(index)?);
    let parts: Vec<&str> = inside.split('.').collect();
    Some(match *parts.as_slice() {
        ["norm_out", end] => format!("conv_norm_out.{end}"),
        ["mid", "block_1", layer, end] => format!("mid_block.resnets.0.{}.{end}", resnet_layer(layer)),
        ["mid", "block_2", layer, end] => format!("mid_block.resnets.1.{}.{end}", resnet_layer(layer)),
        ["mid", "attn_1", layer, end] | ["mid_block", "attentions", "0", layer, end] => {
            format!("mid_block.attentions.0.{}.{end}", attention_layer(layer))
        }
        ["up", i, "block", j, layer, end] => {
            format!(
                "up_blocks.{}.resnets.{j}.{}.{end}",
                from_the_end(i)?,
                resnet_layer(layer)
            )
        }
        ["up", i, "upsample", "conv", end] => format!("up_blocks.{}.upsamplers.0.conv.{end}", from_the_end(i)?),
        _ => return None,
    })
}

fn resnet_layer(name: &str) -> &str {
    if name == "nin_shortcut" { "conv_shortcut" } else { name }
}

fn attention_layer(name: &str) -> &str {
    match name {
        "norm" => "group_norm",
        "q" | "query" => "to_q",
        "k" | "key" => "to_k",
        "v" | "value" => "to_v",
        "proj_out" | "proj_attn" => "to_out.0",
        other => other,
    }
}

/// A number written the one usual way, so that `0` and `00` cannot become the same block.
fn parse_index(text: &str) -> Option<usize> {
    let index: u16 = text.parse().ok()?;
    (index.to_string() == text).then_some(index.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_key_style_is_translated() {
        for (source, expected) in [
            ("decoder.conv_in.weight", "decoder.conv_in.weight"),
            ("decoder.conv_out.bias", "decoder.conv_out.bias"),
            ("decoder.norm_out.weight", "decoder.conv_norm_out.weight"),
            (
                "decoder.mid.block_1.norm1.bias",
                "decoder.mid_block.resnets.0.norm1.bias",
            ),
            (
                "decoder.mid.block_2.conv2.weight",
                "decoder.mid_block.resnets.1.conv2.weight",
            ),
            (
                "decoder.mid.attn_1.norm.bias",
                "decoder.mid_block.attentions.0.group_norm.bias",
            ),
            (
                "decoder.mid.attn_1.q.weight",
                "decoder.mid_block.attentions.0.to_q.weight",
            ),
            (
                "decoder.mid.attn_1.k.weight",
                "decoder.mid_block.attentions.0.to_k.weight",
            ),
            (
                "decoder.mid.attn_1.v.weight",
                "decoder.mid_block.attentions.0.to_v.weight",
            ),
            (
                "decoder.mid.attn_1.proj_out.bias",
                "decoder.mid_block.attentions.0.to_out.0.bias",
            ),
            (
                "decoder.mid_block.attentions.0.query.weight",
                "decoder.mid_block.attentions.0.to_q.weight",
            ),
            (
                "decoder.mid_block.attentions.0.key.bias",
                "decoder.mid_block.attentions.0.to_k.bias",
            ),
            (
                "decoder.mid_block.attentions.0.value.weight",
                "decoder.mid_block.attentions.0.to_v.weight",
            ),
            (
                "decoder.mid_block.attentions.0.proj_attn.weight",
                "decoder.mid_block.attentions.0.to_out.0.weight",
            ),
            (
                "decoder.mid_block.attentions.0.to_out.0.weight",
                "decoder.mid_block.attentions.0.to_out.0.weight",
            ),
            (
                "decoder.up.3.block.2.conv1.weight",
                "decoder.up_blocks.0.resnets.2.conv1.weight",
            ),
            (
                "decoder.up.0.block.0.nin_shortcut.bias",
                "decoder.up_blocks.3.resnets.0.conv_shortcut.bias",
            ),
            (
                "decoder.up.1.upsample.conv.weight",
                "decoder.up_blocks.2.upsamplers.0.conv.weight",
            ),
            (
                "decoder.up_blocks.2.upsamplers.0.conv.weight",
                "decoder.up_blocks.2.upsamplers.0.conv.weight",
            ),
            ("decoder.post_quant_conv.bias", "post_quant_conv.bias"),
            ("post_quant_conv.weight", "post_quant_conv.weight"),
            ("bn.running_mean", "bn.running_mean"),
        ] {
            for prefix in ["", "first_stage_model.", "vae."] {
                let source = format!("{prefix}{source}");
                assert_eq!(canonical(&source, 4).as_deref(), Some(expected), "{source}");
            }
        }
    }

    #[test]
    fn other_models_of_a_checkpoint_are_not_taken_for_the_decoder() {
        for source in [
            "encoder.conv_in.weight",
            "encoder.quant_conv.weight",
            "quant_conv.weight",
            "bn.num_batches_tracked",
            "loss.discriminator.main.0.weight",
            "model.diffusion_model.input_blocks.0.0.weight",
            "model_ema.decoder.conv_in.weight",
            "text_model.decoder.conv_in.weight",
            "cond_stage_model.decoder.conv_in.weight",
            "first_stage_model.vae.decoder.conv_in.weight",
            "first_stage_model.encoder.conv_in.weight",
            "my_vae.decoder.conv_in.weight",
            "decoders.conv_in.weight",
            "decoder",
            "",
        ] {
            assert_eq!(canonical(source, 4), None, "{source}");
        }
    }

    #[test]
    fn unknown_tensors_inside_the_decoder_are_kept_to_be_reported() {
        for source in [
            "decoder.up_blocks.0.foo.weight",
            "decoder.up.0.attn.0.q.weight",
            "decoder.up.00.block.0.conv1.weight",
            "decoder.up.+1.block.0.conv1.weight",
            "decoder.up.7.block.0.conv1.weight",
            "decoder.up.99999999999999999999.block.0.conv1.weight",
            "decoder.mid",
            "decoder.",
            "bn.weight",
        ] {
            assert_eq!(canonical(source, 4).as_deref(), Some(source));
        }
    }

    #[test]
    fn blocks_are_counted_from_the_keys() {
        assert_eq!(count_up_blocks([]), 0);
        assert_eq!(
            count_up_blocks([
                "vae.decoder.up.2.block.0.conv1.weight",
                "decoder.up.0.upsample.conv.bias"
            ]),
            3
        );
        assert_eq!(
            count_up_blocks(["decoder.up.0.block.0.conv1.weight", "decoder.up_blocks.3.resnets.0.x"]),
            4
        );
        assert_eq!(
            count_up_blocks(["encoder.up.9.x", "decoder.up", "decoder.up.x.y", "decoder.upper.4.x"]),
            0
        );
    }
}
