use std::ops::Range;

use vae_ops::ConvKind;

use crate::{
    Result,
    layers::{Layers, ResnetLayers},
};

use super::{
    BandHeights,
    bands::Bands,
    operations::{LayersOf, Operations},
};

/// What a decode has just made.
pub(crate) struct Event<'e, T> {
    /// The stage of the model, a module path.
    pub stage: &'e str,
    /// Whether the stage ends with it.
    pub ends_stage: bool,
    /// Multiply-adds so far.
    pub work: f64,
    /// The last band that was computed, within a stage or at its end.
    pub band: &'e T,
}

/// Is told of every band; an error ends the decode.
pub(crate) type Watch<'w, T> = dyn FnMut(Event<'_, T>) -> Result<()> + 'w;

/// Decodes VAE-space latents, layer by layer, each in bands of rows.
///
/// A layer reads a band of what the layer before made and one row of each neighbour, so its result is that of the whole. Group
/// norms normalise with the moments of all bands, which are taken as the bands are made. Attention reads all of an activation,
/// which at the latents' resolution is small against the last layers'.
pub(crate) fn decode<O: Operations>(
    ops: &O,
    layers: &LayersOf<O>,
    heights: &BandHeights,
    z: O::Tensor,
    watch: &mut Watch<'_, O::Tensor>,
) -> Result<O::Tensor> {
    let mut run = Run {
        ops,
        heights,
        level: 0,
        stage: "latents".to_string(),
        work: 0.0,
        watch,
    };
    run.tell(&z, true)?;
    let Layers {
        post_quant_conv,
        conv_in,
        mid_resnets,
        mid_attentions,
        up_blocks,
        conv_norm_out,
        conv_out,
    } = layers;

    let mut x = Bands::whole(ops, z, None);
    if let Some(conv) = post_quant_conv {
        run.begin("post_quant_conv");
        x = run.convolve(conv, x, false)?;
    }
    run.begin("decoder.conv_in");
    x = run.convolve(conv_in, x, true)?;
    run.begin("decoder.mid_block");
    let mut attentions = mid_attentions.iter();
    for (i, resnet) in mid_resnets.iter().enumerate() {
        let attention = attentions.next();
        let is_last = i + 1 == mid_resnets.len();
        x = run.resnet(resnet, x, is_last && attention.is_none())?;
        if let Some(attention) = attention {
            x = run.attention(attention, x, is_last)?;
        }
    }
    for (i, block) in up_blocks.iter().enumerate() {
        run.begin(&format!("decoder.up_blocks.{i}"));
        for (j, resnet) in block.resnets.iter().enumerate() {
            let is_last = j + 1 == block.resnets.len() && block.upsamplers.is_empty();
            x = run.resnet(resnet, x, is_last)?;
        }
        for upsample in &block.upsamplers {
            run.level += 1;
            x = run.convolve(upsample, x, true)?;
        }
    }
    run.begin("decoder.conv_out");
    let mut image = run.norm_convolve(conv_norm_out, conv_out, x)?;
    image.rows(ops, 0..image.height())
}

struct Run<'r, 'w, O: Operations> {
    ops: &'r O,
    heights: &'r BandHeights,
    /// Doublings so far.
    level: usize,
    stage: String,
    work: f64,
    watch: &'r mut Watch<'w, O::Tensor>,
}

/// A band of a layer's result, and the rows that it comes from.
struct Window {
    /// Of the result.
    rows: Range<usize>,
    /// Of the input, without neighbours.
    core: Range<usize>,
    /// With them.
    outer: Range<usize>,
    /// The first row of the input that the next band reads.
    next: usize,
    /// Whether it is not all of the result.
    is_part: bool,
}

impl Window {
    fn halo(&self) -> [usize; 2] {
        [self.core.start - self.outer.start, self.outer.end - self.core.end]
    }
}

impl<O: Operations> Run<'_, '_, O> {
    fn begin(&mut self, stage: &str) {
        self.stage = stage.to_string();
    }

    fn tell(&mut self, band: &O::Tensor, ends_stage: bool) -> Result<()> {
        (self.watch)(Event {
            stage: &self.stage,
            ends_stage,
            work: self.work,
            band,
        })
    }

    fn worked(&mut self, conv: &O::Conv, rows: usize, x: &O::Tensor) {
        let [batch, _, width] = self.ops.pixels(x);
        self.work += self.ops.work(conv) * (batch * rows * width) as f64;
    }

    /// The bands of the result of a convolution of `height` rows.
    fn windows(&self, kind: ConvKind, height: usize) -> Vec<Window> {
        let (scale, reach) = match kind {
            ConvKind::Point => (1, 0),
            ConvKind::Square => (1, 1),
            ConvKind::Upsample => (2, 1),
        };
        let ranges = self.heights.bands(self.level, scale * height);
        let count = ranges.len();
        let window = |rows: Range<usize>| {
            let core = rows.start / scale..rows.end / scale;
            Window {
                outer: core.start.saturating_sub(reach)..(core.end + reach).min(height),
                next: match core.end == height {
                    true => height,
                    false => core.end - reach,
                },
                core,
                rows,
                is_part: count > 1,
            }
        };
        ranges.into_iter().map(window).collect()
    }

    /// A convolution; `measured` if a norm follows.
    fn convolve(&mut self, conv: &O::Conv, mut x: Bands<O>, measured: bool) -> Result<Bands<O>> {
        let mut y = Bands::new();
        for window in self.windows(self.ops.kind(conv), x.height()) {
            let band = x.rows(self.ops, window.outer.clone())?;
            x.release_above(window.next);
            self.worked(conv, window.core.len(), &band);
            let is_last = window.next == x.height();
            self.finish(conv, band, None, &window, measured, &mut y, is_last)?;
        }
        Ok(y)
    }

    /// Two sweeps over the bands: one that frees its input if there is a shortcut, and one that frees the residual.
    fn resnet(
        &mut self,
        layers: &ResnetLayers<O::Conv, O::Norm>,
        mut x: Bands<O>,
        ends_stage: bool,
    ) -> Result<Bands<O>> {
        let ResnetLayers {
            norm1,
            conv1,
            norm2,
            conv2,
            conv_shortcut,
        } = layers;
        let mut shortcut = conv_shortcut.as_ref().map(|conv| (conv, Bands::new()));
        let mut h = Bands::new();
        for window in self.windows(self.ops.kind(conv1), x.height()) {
            let band = x.rows(self.ops, window.outer.clone())?;
            self.worked(conv1, window.core.len(), &band);
            if let Some((conv, residual)) = &mut shortcut {
                x.release_above(window.next);
                self.worked(conv, window.core.len(), &band);
                let band = self.ops.conv(conv, band.clone(), window.halo(), None);
                residual.push(self.ops, band, None, window.is_part)?;
            }
            let band = self.ops.norm_silu(norm1, band, x.moments());
            self.finish(conv1, band, None, &window, true, &mut h, false)?;
        }
        let mut residual = shortcut.map_or(x, |(_, residual)| residual);
        let mut y = Bands::new();
        for window in self.windows(self.ops.kind(conv2), h.height()) {
            let band = h.rows(self.ops, window.outer.clone())?;
            h.release_above(window.next);
            self.worked(conv2, window.core.len(), &band);
            let band = self.ops.norm_silu(norm2, band, h.moments());
            let added = residual.rows(self.ops, window.core.clone())?;
            residual.release_above(window.core.end);
            let is_last = window.next == h.height();
            self.finish(conv2, band, Some(added), &window, true, &mut y, ends_stage && is_last)?;
        }
        Ok(y)
    }

    fn norm_convolve(&mut self, norm: &O::Norm, conv: &O::Conv, mut x: Bands<O>) -> Result<Bands<O>> {
        let mut y = Bands::new();
        for window in self.windows(self.ops.kind(conv), x.height()) {
            let band = x.rows(self.ops, window.outer.clone())?;
            x.release_above(window.next);
            self.worked(conv, window.core.len(), &band);
            let band = self.ops.norm_silu(norm, band, x.moments());
            let is_last = window.next == x.height();
            self.finish(conv, band, None, &window, false, &mut y, is_last)?;
        }
        Ok(y)
    }

    /// Convolves what a window reads and appends the result.
    #[allow(clippy::too_many_arguments, reason = "they differ in every sweep")]
    fn finish(
        &mut self,
        conv: &O::Conv,
        band: O::Tensor,
        residual: Option<O::Tensor>,
        window: &Window,
        measured: bool,
        y: &mut Bands<O>,
        ends_stage: bool,
    ) -> Result<()> {
        let (band, moments) = match measured {
            true => {
                let (band, moments) = self.ops.conv_measured(conv, band, window.halo(), residual);
                (band, Some(moments))
            }
            false => (self.ops.conv(conv, band, window.halo(), residual), None),
        };
        debug_assert_eq!(self.ops.height(&band), window.rows.len());
        self.tell(&band, ends_stage)?;
        y.push(self.ops, band, moments, window.is_part)
    }

    fn attention(&mut self, attention: &O::Attention, mut x: Bands<O>, ends_stage: bool) -> Result<Bands<O>> {
        let whole = x.rows(self.ops, 0..x.height())?;
        x.release_above(x.height());
        let (y, moments) = self.ops.attention(attention, whole, x.into_moments());
        self.tell(&y, ends_stage)?;
        Ok(Bands::whole(self.ops, y, Some(moments)))
    }
}
