//! Decodes in bands of rows, exact for any height of the bands.

pub(crate) mod bands;
pub(crate) mod operations;
pub(crate) mod run;
pub(crate) mod storage;

use std::{fmt, marker::PhantomData, num::NonZeroUsize, ops::Range};

use burn::tensor::Tensor;

use crate::{DecoderConfig, FoldedDecoder, Result, VaeModel, convolve, memory::work_of_stages};

use operations::{Fused, Stock, stock_layers};
use run::Event;
pub use storage::Storage;
use storage::Store;

/// How a decode is cut into bands, and where they are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TilePlan {
    /// Rows of latents in a band at the image's resolution; the whole image without.
    pub rows: Option<NonZeroUsize>,
    /// Where bands are while nothing computes with them.
    pub storage: Storage,
}

/// Rows of a band at each resolution.
///
/// A band at the image's resolution is what was asked for. Rows of lower resolutions have fewer elements, so a band has more of
/// them: as many as need no more memory, because every band computes its neighbours' rows too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BandHeights {
    /// By doublings; empty for bands of any height.
    by_level: Vec<usize>,
}

impl BandHeights {
    pub fn new(config: &DecoderConfig, rows: Option<NonZeroUsize>) -> Self {
        let Some(rows) = rows else {
            return Self { by_level: Vec::new() };
        };
        let widths: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        // Elements of a row as wide as one latent: a block starts with the width of the one before, already doubled.
        let row = |level: usize| (widths[level].max(widths[level.saturating_sub(1)])) << level;
        let last = widths.len() - 1;
        let elements = (rows.get() << last).saturating_mul(row(last));
        let by_level = (0..=last).map(|level| {
            let rows = (elements / row(level)).max(rows.get() << level);
            // What was doubled is cut at pairs of rows.
            if level > 0 { rows & !1 } else { rows }
        });
        Self {
            by_level: by_level.collect(),
        }
    }

    /// The bands of `height` rows.
    pub fn bands(&self, level: usize, height: usize) -> Vec<Range<usize>> {
        let rows = self.by_level.get(level).map_or(height, |&rows| rows.min(height));
        (0..height)
            .step_by(rows)
            .map(|start| start..(start + rows).min(height))
            .collect()
    }
}

/// What a decode has done so far.
#[derive(Debug)]
pub struct Progress<'p> {
    /// The stage that was just worked on: its module path, or `latents` before the first.
    pub stage: &'p str,
    /// Whether the stage is done with it.
    pub ends_stage: bool,
    /// The share of all arithmetic that is done, 0 to 1.
    pub done: f64,
    /// What the stage made last, `[batch, channels, rows, width]`: a part of it if the decode runs in bands. The work is
    /// enqueued; on a GPU the values may come much later.
    pub activation: &'p Tensor<4>,
}

/// Is told of every band and stage; an error ends the decode.
pub type Watch<'w> = dyn FnMut(Progress<'_>) -> Result<()> + 'w;

impl FoldedDecoder {
    /// Decodes latents that `model`, which it was made from, has [prepared](VaeModel::prepare), in the model's type.
    ///
    /// # Shapes
    /// - `z`: `[batch, latent_channels, height, width]`
    /// - returns `[batch, out_channels, s * height, s * width]` in -1..1, `s` = 2^(up blocks - 1), a view of
    ///   channels-last memory
    ///
    /// # Errors
    /// What `watch` returns, and what storage and device fail with.
    pub fn decode(
        &self,
        model: &dyn VaeModel,
        z: Tensor<4>,
        tile: TilePlan,
        watch: &mut Watch<'_>,
    ) -> Result<Tensor<4>> {
        let ops = Fused {
            store: Store::new(tile.storage, &z.device())?,
        };
        let heights = BandHeights::new(model.decoder_config(), tile.rows);
        let total = total_work(model, &z);
        let mut watch = |event: Event<'_, Tensor<4>>| {
            watch(Progress {
                stage: event.stage,
                ends_stage: event.ends_stage,
                done: event.work / total,
                activation: &event.band.clone().permute([0, 3, 1, 2]),
            })
        };
        let image = run::decode(&ops, &self.layers, &heights, z.permute([0, 2, 3, 1]), &mut watch)?;
        Ok(image.permute([0, 3, 1, 2]))
    }
}

/// Decodes latents that were [prepared](VaeModel::prepare) by stock operations ([`Quality::Lossless`]), in the model's type, on
/// its device.
///
/// # Shapes
/// As [`FoldedDecoder::decode`].
///
/// # Errors
/// As [`FoldedDecoder::decode`].
///
/// [`Quality::Lossless`]: crate::Quality::Lossless
pub fn decode_lossless(model: &dyn VaeModel, z: Tensor<4>, tile: TilePlan, watch: &mut Watch<'_>) -> Result<Tensor<4>> {
    if tile.rows.is_none() {
        return decode_lossless_whole(model, z, watch);
    }
    let config = model.decoder_config();
    let ops = Stock {
        store: Store::new(tile.storage, &z.device())?,
        groups: config.norm_num_groups,
        model: PhantomData,
    };
    let heights = BandHeights::new(config, tile.rows);
    let total = total_work(model, &z);
    let mut watch = |event: Event<'_, Tensor<4>>| {
        watch(Progress {
            stage: event.stage,
            ends_stage: event.ends_stage,
            done: event.work / total,
            activation: event.band,
        })
    };
    run::decode(&ops, &stock_layers(model), &heights, z, &mut watch)
}

/// The modules' own `forward`, the reference for everything else.
fn decode_lossless_whole(model: &dyn VaeModel, mut z: Tensor<4>, watch: &mut Watch<'_>) -> Result<Tensor<4>> {
    let stages = work_of_stages(model, pixels(&z));
    let mut works = stages.iter().map(|(_, work)| *work);
    let total = total_work(model, &z);
    let mut observer = |stage: &str, activation: &Tensor<4>| {
        watch(Progress {
            stage,
            ends_stage: true,
            done: works.next().map_or(1.0, |work| work / total),
            activation,
        })
    };
    observer("latents", &z)?;
    if let Some(conv) = model.post_quant_conv() {
        z = convolve(conv, z);
        observer("post_quant_conv", &z)?;
    }
    model.decoder().forward(z, &mut observer)
}

fn total_work(model: &dyn VaeModel, z: &Tensor<4>) -> f64 {
    work_of_stages(model, pixels(z)).last().map_or(1.0, |(_, work)| *work)
}

/// Images, height and width.
fn pixels(z: &Tensor<4>) -> [usize; 3] {
    let [batch, _, height, width] = z.dims();
    [batch, height, width]
}

impl fmt::Display for TilePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.rows, self.storage) {
            (None, _) => f.write_str("all rows at once"),
            (Some(rows), Storage::Device) => write!(f, "bands of {rows} rows of latents"),
            (Some(rows), storage) => write!(f, "bands of {rows} rows of latents, storage {storage}"),
        }
    }
}
