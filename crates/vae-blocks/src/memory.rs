//! The memory that a decode needs, predicted before it runs: the decode itself, on sizes in place of tensors.

use std::{cell::RefCell, collections::VecDeque, fmt, iter, ops::Range, rc::Rc};

use burn::{
    nn::conv::Conv2d,
    tensor::{DType, FloatDType},
};
use vae_ops::{
    ConvKind,
    support::{ConvEngine, DeviceProfile, Runtime},
};

use crate::{
    AttentionBlock, GroupNorm, Quality, Result, Storage, TilePlan, VaeModel,
    layers::Layers,
    tiled::{
        BandHeights,
        bands::Place,
        operations::{LayersOf, Operations, work},
        run,
        storage::BANDS_IN_FLIGHT,
    },
};

/// The memory that a decode needs at most, weights included, in bytes.
///
/// On the CPU it is what is used; an allocator that keeps what was freed adds to that. glibc's does for buffers below its
/// `M_MMAP_THRESHOLD`, which grows to 32 MiB: the program `decode` sets 8 MiB, and peaks are then within a fifth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Of the device; none on the CPU, where all of it is the host's.
    pub device: u64,
    /// Of the host, for this process.
    pub host: u64,
    /// Of the largest single buffer on the device.
    pub largest_buffer: u64,
    /// Elements of the largest tensor.
    pub largest_tensor: u64,
}

/// What a forecast is for.
#[derive(Debug, Clone, Copy)]
pub struct DecodeCase {
    /// How it computes.
    pub quality: Quality,
    /// The type of weights and activations.
    pub dtype: FloatDType,
    /// Images, and height and width of the latents in VAE space.
    pub size: [usize; 3],
    /// How it is cut.
    pub tile: TilePlan,
    /// Whether the folded weights of [`Quality::High`] exist, whatever `quality` is.
    pub folded: bool,
}

impl MemoryEstimate {
    /// The memory of a decode on a device, from the shapes of a model's parameters: they need not have values yet.
    pub fn new(model: &dyn VaeModel, device: &DeviceProfile, case: DecodeCase) -> Self {
        let machine = match &device.runtime {
            Runtime::Gpu(gpu) => {
                let channels = model.decoder_config().block_out_channels.last().copied().unwrap_or(0);
                let (engine, _) = device.attention_engine(case.dtype.into(), channels);
                Machine::Gpu {
                    sm_90a_attention: (engine == ConvEngine::Hopper).then_some(gpu.multiprocessors as usize),
                }
            }
            _ => Machine::Cpu {
                threads: rayon::current_num_threads() as u64,
            },
        };
        let (sizes, _) = walk(model, machine, case);
        let (weights, folds) = weights(&layers(model), machine, sizes.element);
        let has_folds = case.folded || case.quality == Quality::High;
        let weights = weights + if has_folds { folds } else { 0 };
        let (on_device, on_host) = (sizes.device.borrow(), sizes.host.borrow());
        let largest_buffer = on_device.largest;
        let (device, host) = match machine {
            Machine::Cpu { .. } => (0, on_device.peak + on_device.peak / FRAGMENTS + weights + PROCESS),
            Machine::Gpu { .. } => (
                on_device.peak + weights + weights * WEIGHT_PAGES_PERCENT / 100 + CONTEXT,
                on_host.peak + PROCESS,
            ),
        };
        Self {
            device,
            host,
            largest_buffer,
            largest_tensor: largest_buffer / sizes.element,
        }
    }
}

/// Multiply-adds of a decode at the end of each of its stages.
pub(crate) fn work_of_stages(model: &dyn VaeModel, size: [usize; 3]) -> Vec<(String, f64)> {
    let case = DecodeCase {
        quality: Quality::Lossless,
        dtype: FloatDType::F32,
        size,
        tile: TilePlan::default(),
        folded: false,
    };
    walk(model, Machine::Cpu { threads: 1 }, case).1
}

/// Goes through a decode without doing it.
fn walk(model: &dyn VaeModel, machine: Machine, case: DecodeCase) -> (Sizes, Vec<(String, f64)>) {
    let device = Rc::new(RefCell::new(Ledger::new(machine)));
    let sizes = Sizes {
        machine,
        quality: case.quality,
        tile: case.tile,
        element: DType::from(case.dtype).size() as u64,
        host: match machine {
            Machine::Cpu { .. } => device.clone(),
            Machine::Gpu { .. } => Rc::default(),
        },
        device,
        leaving: RefCell::default(),
    };
    let mut stages = Vec::new();
    let mut watch = |event: run::Event<'_, Sized>| {
        if event.ends_stage {
            stages.push((event.stage.to_string(), event.work));
        }
        Ok(())
    };
    let [batch, height, width] = case.size;
    let channels = model.decoder_config().latent_channels;
    let z = sizes.tensor([batch, height, width, channels]);
    let heights = BandHeights::new(model.decoder_config(), case.tile.rows);
    if let Err(error) = run::decode(&sizes, &layers(model), &heights, z, &mut watch) {
        unreachable!("sizes do not fail: {error}");
    }
    (sizes, stages)
}

/// What a process takes besides: its code and threads. This and the other allowances are what measured decodes took beyond
/// what is counted, so that no prediction is under.
const PROCESS: u64 = 64 << 20;
/// What a GPU's pools hold besides: pages that weights came in, a little more than the weights, and moments. Measured on an H200.
const CONTEXT: u64 = 24 << 20;
const WEIGHT_PAGES_PERCENT: u64 = 105;
/// Weights as large as the largest that the CPU's allocator keeps of those it has freed, and more of them after folding.
const RETAINED: u64 = 5;
const RETAINED_BY_FOLDING: u64 = 4;
/// One part in so many of the activations is what an allocator loses between them.
const FRAGMENTS: u64 = 50;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Machine {
    /// Burn's CPU backend, whose threads have scratch memory.
    Cpu { threads: u64 },
    /// Multiprocessors, where attention runs on the sm_90a kernels.
    Gpu { sm_90a_attention: Option<usize> },
}

/// Counts allocations.
#[derive(Debug, Default)]
struct Ledger {
    live: u64,
    peak: u64,
    largest: u64,
    /// Of a GPU: what counts is what its pages take.
    pages: Option<Pages>,
}

impl Ledger {
    fn new(machine: Machine) -> Self {
        Self {
            pages: matches!(machine, Machine::Gpu { .. }).then(Pages::default),
            ..Self::default()
        }
    }

    fn allocate(&mut self, bytes: u64) -> Option<Slice> {
        self.live += bytes;
        self.largest = self.largest.max(bytes);
        let slice = self.pages.as_mut().map(|pages| pages.allocate(bytes));
        let taken = self.pages.as_ref().map_or(self.live, Pages::reserved);
        self.peak = self.peak.max(taken);
        slice
    }

    fn free(&mut self, bytes: u64, slice: Option<Slice>) {
        self.live -= bytes;
        if let (Some(pages), Some(slice)) = (&mut self.pages, slice) {
            pages.free(slice);
        }
    }
}

/// How CubeCL takes memory from a driver: pages as large as the largest allocation so far, cut into slices. Pages of an earlier,
/// smaller size go back when they are empty, those of the present size stay.
#[derive(Debug, Default)]
struct Pages {
    size: u64,
    /// By number; `None` went back.
    pages: Vec<Option<Page>>,
}

#[derive(Debug)]
struct Page {
    size: u64,
    /// In order, not overlapping, not empty.
    used: Vec<Range<u64>>,
}

/// Where an allocation is: the number of its page, and its first byte.
#[derive(Debug, Clone, Copy)]
struct Slice {
    page: usize,
    start: u64,
}

impl Pages {
    const GRANULE: u64 = 1 << 20;
    const ALIGNMENT: u64 = 512;

    fn allocate(&mut self, bytes: u64) -> Slice {
        let bytes = bytes.max(1).next_multiple_of(Self::ALIGNMENT);
        if bytes > self.size {
            self.size = (bytes + Self::GRANULE).next_multiple_of(Self::GRANULE);
            self.give_back();
        }
        for (index, page) in self.pages.iter_mut().enumerate() {
            if let Some(page) = page
                && page.size == self.size
                && let Some(start) = page.place(bytes)
            {
                return Slice { page: index, start };
            }
        }
        self.pages.push(Some(Page {
            size: self.size,
            used: iter::once(0..bytes).collect(),
        }));
        Slice {
            page: self.pages.len() - 1,
            start: 0,
        }
    }

    fn free(&mut self, slice: Slice) {
        if let Some(page) = &mut self.pages[slice.page] {
            page.used.retain(|used| used.start != slice.start);
        }
        self.give_back();
    }

    fn give_back(&mut self) {
        let size = self.size;
        for page in &mut self.pages {
            if page
                .as_ref()
                .is_some_and(|page| page.size != size && page.used.is_empty())
            {
                *page = None;
            }
        }
    }

    fn reserved(&self) -> u64 {
        self.pages.iter().flatten().map(|page| page.size).sum()
    }
}

impl Page {
    /// Takes the first gap that is large enough.
    fn place(&mut self, bytes: u64) -> Option<u64> {
        let mut start = 0;
        for index in 0..=self.used.len() {
            let end = self.used.get(index).map_or(self.size, |used| used.start);
            if end - start >= bytes {
                self.used.insert(index, start..start + bytes);
                return Some(start);
            }
            start = self.used.get(index).map_or(end, |used| used.end);
        }
        None
    }
}

/// An allocation; freed when it is dropped.
#[derive(Debug)]
struct Allocation {
    ledger: Rc<RefCell<Ledger>>,
    bytes: u64,
    slice: Option<Slice>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.ledger.borrow_mut().free(self.bytes, self.slice);
    }
}

fn allocate(ledger: &Rc<RefCell<Ledger>>, bytes: u64) -> Allocation {
    let slice = ledger.borrow_mut().allocate(bytes);
    Allocation {
        ledger: ledger.clone(),
        bytes,
        slice,
    }
}

/// A tensor that is nothing but its size.
#[derive(Debug, Clone)]
pub(crate) struct Sized {
    memory: Rc<Allocation>,
    /// Batch, height, width, channels.
    dims: [usize; 4],
    /// It is a part of a larger one, which operations of the CPU copy first.
    is_view: bool,
}

/// A convolution that is nothing but its size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SizedConv {
    kind: ConvKind,
    channels_in: usize,
    channels_out: usize,
}

/// Operations on sizes.
pub(crate) struct Sizes {
    machine: Machine,
    quality: Quality,
    tile: TilePlan,
    /// Bytes.
    element: u64,
    device: Rc<RefCell<Ledger>>,
    host: Rc<RefCell<Ledger>>,
    /// Bands that are still on the device.
    leaving: RefCell<VecDeque<Sized>>,
}

/// The layers of a model, as sizes; parameters that are not there yet stay so.
fn layers(model: &dyn VaeModel) -> LayersOf<Sizes> {
    let conv = |kind, layer: &Conv2d| {
        let [channels_out, channels_in, ..] = layer.weight.lazy_shape().dims::<4>();
        SizedConv {
            kind,
            channels_in,
            channels_out,
        }
    };
    let norm = |norm: &GroupNorm| norm.weight.lazy_shape()[0];
    let attention = |block: &AttentionBlock| block.group_norm.weight.lazy_shape()[0];
    Layers::of(model, conv, norm, attention)
}

/// Bytes of the weights of a model, and of their folded copies.
fn weights(layers: &LayersOf<Sizes>, machine: Machine, element: u64) -> (u64, u64) {
    let (mut weights, mut folds, mut largest) = (0, 0, 0);
    let mut conv = |conv: &SizedConv| {
        let [channels_in, channels_out] = [conv.channels_in as u64, conv.channels_out as u64];
        let taps = if conv.kind == ConvKind::Point { 1 } else { 9 };
        largest = largest.max(taps * channels_in * channels_out * 4);
        weights += (taps * channels_in + 1) * channels_out * element;
        folds += match machine {
            Machine::Cpu { .. } => taps * channels_in.next_multiple_of(16) * channels_out.next_multiple_of(16) * 4,
            Machine::Gpu { .. } if conv.kind == ConvKind::Upsample => 16 * channels_in * channels_out * element,
            Machine::Gpu { .. } => taps * channels_in * channels_out * element,
        };
    };
    let mut resnets = layers.mid_resnets.iter().collect::<Vec<_>>();
    resnets.extend(layers.up_blocks.iter().flat_map(|block| &block.resnets));
    for resnet in resnets {
        conv(&resnet.conv1);
        conv(&resnet.conv2);
        resnet.conv_shortcut.iter().for_each(&mut conv);
    }
    layers.post_quant_conv.iter().for_each(&mut conv);
    layers
        .up_blocks
        .iter()
        .flat_map(|block| &block.upsamplers)
        .for_each(&mut conv);
    conv(&layers.conv_in);
    conv(&layers.conv_out);
    for &channels in &layers.mid_attentions {
        let point = SizedConv {
            kind: ConvKind::Point,
            channels_in: channels,
            channels_out: channels,
        };
        // Queries, keys, values, and the output's projection, which is folded into the values'.
        (0..4).for_each(|_| conv(&point));
    }
    if let Machine::Cpu { .. } = machine {
        weights += RETAINED * largest;
        folds += RETAINED_BY_FOLDING * largest;
    }
    (weights, folds)
}

impl Sizes {
    fn bytes(&self, dims: [usize; 4]) -> u64 {
        let elements = dims
            .iter()
            .fold(1u64, |product, &dim| product.saturating_mul(dim as u64));
        // Far above any memory, and far below where sums would overflow.
        elements.saturating_mul(self.element).min(1 << 56)
    }

    fn tensor(&self, dims: [usize; 4]) -> Sized {
        Sized {
            memory: Rc::new(self.scratch(self.bytes(dims))),
            dims,
            is_view: false,
        }
    }

    fn scratch(&self, bytes: u64) -> Allocation {
        allocate(&self.device, bytes.min(1 << 56))
    }

    /// What an operation makes of a part of a tensor before it starts.
    fn contiguous(&self, x: &Sized) -> Option<Allocation> {
        let is_copied = match self.machine {
            Machine::Cpu { .. } => x.is_view,
            // Rows of one image lie side by side.
            Machine::Gpu { .. } => x.is_view && x.dims[0] > 1,
        };
        is_copied.then(|| self.scratch(self.bytes(x.dims)))
    }

    /// By operations of our own on channels-last tensors.
    fn is_fused(&self) -> bool {
        self.quality == Quality::High
    }

    /// What a convolution needs besides its operands and result.
    fn conv_scratch(&self, conv: &SizedConv, x: &Sized) -> u64 {
        let Machine::Cpu { threads } = self.machine else {
            return 0;
        };
        let [channels_in, channels_out] = [conv.channels_in as u64, conv.channels_out as u64];
        match (self.is_fused(), conv.kind) {
            (true, ConvKind::Point) => threads * 128 * (channels_in + 128) * 4,
            // Transformed weights, and blocks of transformed tiles and products.
            (true, ConvKind::Square) => {
                36 * channels_in.next_multiple_of(16) * channels_out.next_multiple_of(16) * 4
                    + threads * 36 * 64 * (channels_in + 128) * 4
            }
            (true, ConvKind::Upsample) => {
                25 * channels_in.next_multiple_of(16) * channels_out.next_multiple_of(16) * 4
                    + threads * 128 * (9 * channels_in + 25 * 128) * 4
            }
            (false, ConvKind::Point) => 0,
            // Burn's: the input channels-last, the weights again, and columns and a product for each thread.
            (false, kind) => {
                let scale = if kind == ConvKind::Upsample { 4 } else { 1 };
                let wide = if self.element == 4 { 1 } else { 3 };
                wide * scale * self.bytes(x.dims)
                    + 9 * channels_in * channels_out * 4
                    + threads * 512 * (9 * channels_in + channels_out) * 4
            }
        }
    }
}

/// A band off the device.
pub(crate) struct SizedAway {
    _host: Option<Allocation>,
    dims: [usize; 4],
    /// On its way back.
    returning: Option<Sized>,
}

impl Operations for Sizes {
    type Tensor = Sized;
    type Moments = ();
    type Away = SizedAway;
    type Conv = SizedConv;
    /// Channels.
    type Norm = usize;
    /// Channels.
    type Attention = usize;

    fn kind(&self, conv: &SizedConv) -> ConvKind {
        conv.kind
    }

    fn work(&self, conv: &SizedConv) -> f64 {
        work(conv.kind, conv.channels_in, conv.channels_out)
    }

    fn pixels(&self, x: &Sized) -> [usize; 3] {
        [x.dims[0], x.dims[1], x.dims[2]]
    }

    fn crop(&self, mut x: Sized, rows: Range<usize>) -> Sized {
        x.is_view |= rows.len() < x.dims[1];
        x.dims[1] = rows.len();
        x
    }

    fn stack(&self, bands: Vec<Sized>) -> Sized {
        let mut dims = bands[0].dims;
        dims[1] = bands.iter().map(|band| band.dims[1]).sum();
        let _copies: Vec<_> = bands.iter().map(|band| self.contiguous(band)).collect();
        self.tensor(dims)
    }

    fn conv(&self, conv: &SizedConv, x: Sized, halo: [usize; 2], residual: Option<Sized>) -> Sized {
        let scale = if conv.kind == ConvKind::Upsample { 2 } else { 1 };
        let [batch, rows, width, _] = x.dims;
        let out = |rows| [batch, scale * rows, scale * width, conv.channels_out];
        let core = rows - halo[0] - halo[1];
        let _copies = (
            self.contiguous(&x),
            residual.as_ref().map(|residual| self.contiguous(residual)),
        );
        let _scratch = self.scratch(self.conv_scratch(conv, &x));
        if self.is_fused() {
            return match self.machine {
                Machine::Gpu { .. } if halo != [0, 0] => {
                    // Rows of the halo are computed too, and cut off.
                    let _widened = residual.map(|_| self.tensor(out(rows)));
                    self.crop(self.tensor(out(rows)), 0..scale * core)
                }
                _ => self.tensor(out(core)),
            };
        }
        // Doubled, and with rows of zeros around a band.
        let _doubled =
            (conv.kind == ConvKind::Upsample).then(|| self.tensor([batch, scale * rows, scale * width, x.dims[3]]));
        let is_whole = self.tile.rows.is_none();
        let _around = (conv.kind != ConvKind::Point && !is_whole && halo != [1, 1])
            .then(|| self.tensor([batch, scale * rows, scale * width, x.dims[3]]));
        let y = self.tensor(out(core));
        match residual {
            Some(_) => self.tensor(y.dims),
            None => y,
        }
    }

    fn conv_measured(&self, conv: &SizedConv, x: Sized, halo: [usize; 2], residual: Option<Sized>) -> (Sized, ()) {
        let y = self.conv(conv, x, halo, residual);
        drop(self.contiguous(&y));
        (y, ())
    }

    fn merge(&self, _: (), _: ()) {}

    fn norm_silu(&self, _: &usize, x: Sized, _: &()) -> Sized {
        let copy = self.contiguous(&x);
        if self.is_fused() {
            let is_gpu = matches!(self.machine, Machine::Gpu { .. });
            // In place, where nobody else has it.
            return match is_gpu && copy.is_none() && Rc::strong_count(&x.memory) == 1 {
                true => x,
                false => self.tensor(x.dims),
            };
        }
        match self.machine {
            // Groups one by one, then side by side.
            Machine::Cpu { .. } => {
                let _groups = self.tensor(x.dims);
                self.tensor(x.dims)
            }
            // Centred, squared and scaled in f32.
            Machine::Gpu { .. } => {
                let wide = self.bytes(x.dims) / self.element * 4;
                let _wide = (self.scratch(wide), self.scratch(wide));
                self.tensor(x.dims)
            }
        }
    }

    fn attention(&self, &channels: &usize, x: Sized, _: ()) -> (Sized, ()) {
        let [batch, height, width, _] = x.dims;
        let tokens = height * width;
        let normalized = self.norm_silu(&channels, x.clone(), &());
        let wide = |parts: usize| self.tensor([batch, height, width, parts * channels]);
        let y = match (self.machine, self.is_fused()) {
            (Machine::Gpu { sm_90a_attention }, true) => {
                let _projected = wide(3);
                let square = (tokens as u64).saturating_mul(tokens as u64);
                let _scratch = match sm_90a_attention {
                    // Probabilities of a chunk of queries, and partial results of ranges of keys, 256 MiB together.
                    Some(multiprocessors) => {
                        let most = 256 << 20;
                        let probabilities = square.saturating_mul(2).min(most);
                        let partial = 128 * multiprocessors as u64 * (channels as u64 + 2) * 4;
                        (
                            self.scratch(probabilities),
                            self.scratch(partial.min(most - probabilities)),
                        )
                    }
                    // Scores of a chunk in f32, and probabilities.
                    None => {
                        let scores = square.saturating_mul(4).min(128 << 20).max(4 * tokens as u64);
                        (self.scratch(scores), self.scratch(scores / 4 * self.element))
                    }
                };
                wide(1)
            }
            _ => {
                let _projected = wide(3);
                drop(normalized);
                let _query = wide(1);
                let scores = ((1u64 << 24).min((tokens as u64).saturating_mul(tokens as u64)) * 4)
                    .max(4 * (batch * tokens) as u64);
                let softmax = (self.scratch(scores), self.scratch(scores));
                let _rows = wide(1);
                drop(softmax);
                wide(1)
            }
        };
        (y, ())
    }

    fn send_away(&self, x: Sized) -> Result<Place<Self>> {
        let is_cpu = matches!(self.machine, Machine::Cpu { .. });
        let bytes = match self.tile.storage {
            Storage::Device => return Ok(Place::Here(x)),
            Storage::Host if is_cpu => return Ok(Place::Here(x)),
            Storage::Host => self.bytes(x.dims),
            Storage::Half => self.bytes(x.dims) / self.element * 2,
            Storage::Disk => 0,
        };
        let host = allocate(&self.host, bytes);
        // Until they are moved, some bands wait on the device; on the CPU none waits, and this one is freed.
        let waiting = if is_cpu { 0 } else { BANDS_IN_FLIGHT };
        let mut leaving = self.leaving.borrow_mut();
        leaving.push_back(x.clone());
        while leaving.len() > waiting {
            leaving.pop_front();
        }
        Ok(Place::Away(SizedAway {
            _host: Some(host),
            dims: x.dims,
            returning: None,
        }))
    }

    fn call_back(&self, mut away: SizedAway) -> Result<SizedAway> {
        if matches!(self.machine, Machine::Gpu { .. }) && away.returning.is_none() {
            away.returning = Some(self.tensor(away.dims));
        }
        Ok(away)
    }

    fn take_back(&self, away: SizedAway) -> Result<Sized> {
        Ok(match away.returning {
            Some(x) => x,
            None => {
                // As it was read, and as a tensor.
                let _read = self.tensor(away.dims);
                self.tensor(away.dims)
            }
        })
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.device > 0 {
            write!(f, "{} MiB of the device and ", mib(self.device))?;
        }
        write!(f, "{} MiB of the host", mib(self.host))
    }
}

/// Whole MiB, rounded up.
pub(crate) fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_grow_with_the_largest_allocation_and_go_back_when_they_are_empty() {
        const MIB: u64 = 1 << 20;
        let mut pages = Pages::default();
        let small = pages.allocate(3 * MIB);
        assert_eq!(pages.reserved(), 4 * MIB);
        // A second one does not fit beside the first, two of another size share a page.
        let second = pages.allocate(3 * MIB);
        assert_eq!(pages.reserved(), 8 * MIB);
        let large = pages.allocate(8 * MIB);
        assert_eq!(pages.reserved(), 17 * MIB, "both old pages are in use");
        pages.free(small);
        assert_eq!(pages.reserved(), 13 * MIB);
        pages.free(second);
        let (a, b) = (pages.allocate(4 * MIB), pages.allocate(4 * MIB));
        assert_eq!(pages.reserved(), 18 * MIB);
        pages.free(a);
        pages.free(large);
        // The first page is kept and has room again.
        pages.free(b);
        pages.allocate(8 * MIB);
        assert_eq!(pages.reserved(), 18 * MIB);
    }

    #[test]
    fn a_gap_between_slices_is_used_when_it_is_large_enough() {
        let mut page = Page {
            size: 100,
            used: Vec::new(),
        };
        assert_eq!(
            [page.place(30), page.place(30), page.place(30)],
            [Some(0), Some(30), Some(60)]
        );
        page.used.remove(1);
        assert_eq!(
            [page.place(31), page.place(20), page.place(10)],
            [None, Some(30), Some(50)]
        );
        assert_eq!([page.place(10), page.place(1)], [Some(90), None]);
    }
}
