//! `xtask bench-operations`: times the operations of [`Quality::High`](burn_vae::Quality) one by one, at the shapes of a
//! FLUX.2 decode.

use std::{num::NonZeroUsize, time::Duration};

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_vae::{DeviceName, float_dtype};
use clap::ValueEnum;
use integration_tests::random;
use serde::{Deserialize, Serialize};
use vae_ops::{
    AttentionWeight, ConvKind, ConvWeight, Measured, NormWeight,
    support::{ConvEngine, DeviceProfile},
};

use super::{
    card::{Card, device_name},
    outputs::{MEASURING, Outputs},
    protocol::{self, Work, device_failed, read_last},
    report::{Report, Row, clocks},
    row::TypeName,
};
use crate::{Result, checkout};

/// Time single operations of quality high on one device, back to back.
///
/// The shapes are those of FLUX.2 decodes of 1024x1024, and some of 2048x2048. A run is as many calls as take 20 ms, between
/// two synchronises.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    rows: RowsArgs,

    #[command(flatten)]
    outputs: Outputs,
}

/// Which rows are measured, and how.
#[derive(Debug, clap::Args)]
#[group(id = MEASURING)]
struct RowsArgs {
    /// Only these operations
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    only: Option<Vec<Kind>>,

    /// auto, f32, f16, bf16; auto is bf16 on CUDA, else f32
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    dtype: TypeName,

    /// auto, cpu, cuda, cuda:N, wgpu or wgpu:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Auto)]
    device: DeviceName,

    /// Runs before the timed ones
    #[arg(long, value_name = "N", default_value_t = OperationRow::MIN_WARMUPS)]
    warmups: usize,

    /// Timed runs
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::new(OperationRow::MIN_RUNS).unwrap())]
    runs: NonZeroUsize,

    /// Divide the sides of all images by N, to 2 at least, to try this on a slow device
    #[arg(long, value_name = "N", default_value = "1")]
    shrink: NonZeroUsize,
}

/// The operations, as rows name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    Conv3x3,
    Conv1x1,
    /// Nearest-neighbour doubling, then 3x3.
    UpsampleConv3x3,
    GroupNormSilu,
    Attention,
}

/// The time of one call of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperationRow {
    pub operation: String,
    pub shape: String,
    /// Whose, and what it does beyond the operation.
    pub implementation: String,
    pub dtype: String,
    pub us_median: f64,
    pub us_min: f64,
    pub us_max: f64,
    /// 10^12 multiplications and additions a second, of those that the fastest known form needs.
    pub tflops: Option<f64>,
    /// 10^9 bytes a second, of those that must be read and written.
    pub gb_per_s: Option<f64>,
    /// In a run.
    pub calls: usize,
    pub runs: usize,
    pub warmups: usize,
    pub clock_mhz_start: Option<u32>,
    pub clock_mhz_end: Option<u32>,
}

impl Row for OperationRow {
    const KEPT_AS: &str = "-operations";
    const MIN_WARMUPS: usize = 2;
    const MIN_RUNS: usize = 10;
    const TABLE_HEAD: &str = "| operation | shape | implementation | dtype | median us | min | max | TFLOP/s | GB/s | calls | clock MHz |\n\
                              |---|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n";
    const COMPARISON_HEAD: &str = "| operation | shape | dtype | implementation | us | against | its us | time ratio |\n\
                                   |---|---|---|---|---:|---|---:|---:|\n";

    fn warmups(&self) -> usize {
        self.warmups
    }

    fn runs(&self) -> usize {
        self.runs
    }

    fn implementation(&self) -> &str {
        &self.implementation
    }

    fn is_comparable(&self, other: &Self) -> bool {
        (&self.operation, &self.shape, &self.dtype) == (&other.operation, &other.shape, &other.dtype)
    }

    fn table_line(&self) -> String {
        let Self {
            operation,
            shape,
            implementation,
            dtype,
            ..
        } = self;
        let rate = |rate: Option<f64>| match rate {
            Some(rate) if rate >= 100.0 => format!("{rate:.0}"),
            Some(rate) => format!("{rate:.2}"),
            None => String::new(),
        };
        format!(
            "| {operation} | {shape} | {implementation} | {dtype} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {} |",
            self.us_median,
            self.us_min,
            self.us_max,
            rate(self.tflops),
            rate(self.gb_per_s),
            self.calls,
            clocks(self.clock_mhz_start, self.clock_mhz_end),
        )
    }

    fn comparison_line(&self, other: &Self, source: &str) -> String {
        let Self {
            operation,
            shape,
            implementation,
            dtype,
            ..
        } = self;
        format!(
            "| {operation} | {shape} | {dtype} | {implementation} | {:.1} | {source} | {:.1} | {:.3} |",
            self.us_median,
            other.us_median,
            self.us_median / other.us_median,
        )
    }
}

pub fn run(Args { rows, outputs }: &Args) -> Result {
    outputs.report(rows.warmups, rows.runs.get(), || measure(rows))
}

/// A run takes at least as long, so that a synchronise and the first launch are less than a hundredth of it.
const RUN: Duration = Duration::from_millis(20);

/// Buffers take turns until they have as many bytes together, several times a cache's, or are as many.
const ROTATED_BYTES: usize = 256 << 20;
const MOST_BUFFERS: usize = 64;

/// Calls of a run at most.
const MOST_CALLS: f64 = 10_000.0;

const GROUPS: usize = 32;
const EPSILON: f64 = 1e-6;

/// Whose the rows are.
const IMPLEMENTATION: &str = "high";

fn method() -> String {
    format!(
        "xtask bench-operations: wall clock of calls back to back between two synchronises, of which a run has as many as take {} \
         ms, divided by their number; inputs, residuals and results rotate among buffers whose inputs have {} MiB together, at \
         most {MOST_BUFFERS} of them, so that no call finds its input in a cache of less; all operations in one process, kernels compiled \
         before; random normal activations; TFLOP/s of upsample_conv3x3 are of the folded arithmetic, those of attention include \
         three projections; GB/s are of one write and one read, and another read where group_norm_silu has to measure; \
         attention is a whole block with norm, projections and residual; attention_core is that less its norm and its \
         projections, timed alone",
        RUN.as_millis(),
        ROTATED_BYTES >> 20,
    )
}

/// What is timed: channels, and the side of a square image of the input in pixels.
#[derive(Debug, Clone, Copy)]
enum Case {
    Conv(ConvKind, [usize; 2], usize),
    Norm(usize, usize),
    /// A block, and its core.
    Attention(usize, usize),
}

const CASES: [Case; 22] = [
    Case::Conv(ConvKind::Square, [512, 512], 128),
    Case::Conv(ConvKind::Square, [512, 512], 256),
    Case::Conv(ConvKind::Square, [512, 512], 512),
    Case::Conv(ConvKind::Square, [512, 256], 512),
    Case::Conv(ConvKind::Square, [256, 256], 512),
    Case::Conv(ConvKind::Square, [256, 256], 1024),
    Case::Conv(ConvKind::Square, [256, 128], 1024),
    Case::Conv(ConvKind::Square, [128, 128], 1024),
    Case::Conv(ConvKind::Square, [128, 3], 1024),
    Case::Conv(ConvKind::Point, [512, 256], 512),
    Case::Conv(ConvKind::Upsample, [512, 512], 128),
    Case::Conv(ConvKind::Upsample, [512, 512], 256),
    Case::Conv(ConvKind::Upsample, [256, 256], 512),
    // As good as no work, which tells what launching costs.
    Case::Norm(32, 8),
    Case::Norm(512, 128),
    Case::Norm(512, 256),
    Case::Norm(512, 512),
    Case::Norm(256, 1024),
    Case::Norm(128, 1024),
    Case::Attention(512, 64),
    Case::Attention(512, 128),
    Case::Attention(512, 256),
];

impl Case {
    fn kind(self) -> Kind {
        match self {
            Self::Conv(ConvKind::Square, ..) => Kind::Conv3x3,
            Self::Conv(ConvKind::Point, ..) => Kind::Conv1x1,
            Self::Conv(ConvKind::Upsample, ..) => Kind::UpsampleConv3x3,
            Self::Norm(..) => Kind::GroupNormSilu,
            Self::Attention(..) => Kind::Attention,
        }
    }

    /// On an image whose sides are divided.
    fn shrunk(self, divisor: usize) -> Self {
        let divide = |side: usize| (side / divisor).max(2);
        match self {
            Self::Conv(kind, channels, side) => Self::Conv(kind, channels, divide(side)),
            Self::Norm(channels, side) => Self::Norm(channels, divide(side)),
            Self::Attention(channels, side) => Self::Attention(channels, divide(side)),
        }
    }

    fn name(self) -> String {
        self.kind()
            .to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_string())
    }

    fn shape(self) -> String {
        match self {
            Self::Conv(_, [from, to], side) => format!("{from}->{to} {side}x{side}"),
            Self::Norm(channels, side) => format!("{channels} {side}x{side}"),
            Self::Attention(channels, side) => format!("{channels} {} tokens", side * side),
        }
    }
}

/// Measures all operations one after another; says how many cases failed, if not all.
fn measure(args: &RowsArgs) -> Result<(Report<OperationRow>, usize)> {
    let (device, name) = args.device.open()?;
    let dtype = float_dtype(args.dtype.on(name), &device)?;
    let profile = DeviceProfile::of(&device);
    let refusals = profile.refusals(dtype.into());
    if !refusals.is_empty() {
        return Err(refusals.join("; ").into());
    }
    let bench = Bench {
        card: Card::of(&device, name),
        device,
        dtype,
        profile,
        warmups: args.warmups,
        runs: args.runs.get(),
    };
    let mut rows = Vec::new();
    let mut failed = 0;
    for case in CASES {
        if args.only.as_ref().is_some_and(|only| !only.contains(&case.kind())) {
            continue;
        }
        let case = case.shrunk(args.shrink.get());
        match bench.rows(case) {
            Ok(of_case) => {
                for row in &of_case {
                    let OperationRow {
                        operation,
                        shape,
                        implementation,
                        us_median,
                        ..
                    } = row;
                    eprintln!("{operation} {shape}, {implementation}: {us_median:.1} us");
                }
                rows.extend(of_case);
            }
            Err(error) => {
                eprintln!("{} {}: {error}", case.name(), case.shape());
                failed += 1;
            }
        }
    }
    if rows.is_empty() {
        return Err("no row could be measured".into());
    }
    let report = Report {
        device: device_name(&bench.device, name),
        driver: bench.card.as_ref().and_then(Card::driver),
        date: jiff::Timestamp::now().strftime("%F").to_string(),
        commit: checkout::commit(),
        method: method(),
        rows,
    };
    Ok((report, failed))
}

struct Bench {
    card: Option<Card>,
    device: Device,
    dtype: FloatDType,
    profile: DeviceProfile,
    warmups: usize,
    runs: usize,
}

impl Bench {
    fn rows(&self, case: Case) -> Result<Vec<OperationRow>> {
        match case {
            Case::Conv(kind, channels, side) => self.conv(case, kind, channels, side),
            Case::Norm(channels, side) => self.norm(case, channels, side),
            Case::Attention(channels, side) => self.attention(case, channels, side),
        }
    }

    fn conv(&self, case: Case, kind: ConvKind, [from, to]: [usize; 2], side: usize) -> Result<Vec<OperationRow>> {
        // Taps of the weight, products for a value of the result and an input channel, pixels of the result for one.
        let (taps, products, scale) = match kind {
            ConvKind::Point => (1, 1, 1),
            ConvKind::Square => (3, 9, 1),
            ConvKind::Upsample => (3, 4, 4),
        };
        let weight = self.conv_weight(kind, [to, from, taps, taps]);
        let inputs = self.activations(from, side);
        let amount = Amount::Arithmetic(2 * scale * side * side * from * to * products);

        let times = self.time(inputs.len(), |i| weight.forward(inputs[i].clone()).into())?;
        let mut rows = vec![self.row(case, "", IMPLEMENTATION, &times, amount)];
        // What a shortcut and the last convolution make is not normalised.
        if kind == ConvKind::Point || to < GROUPS {
            return Ok(rows);
        }
        let with_moments = if self.delivers_moments(from, to) {
            let implementation = format!("{IMPLEMENTATION}, with moments");
            let times = self.time(inputs.len(), |i| weight.forward_measured(inputs[i].clone(), None))?;
            rows.push(self.row(case, "", &implementation, &times, amount));
            implementation
        } else {
            IMPLEMENTATION.to_string()
        };
        if kind == ConvKind::Square {
            let residuals = self.buffers(inputs.len(), to, side);
            let times = self.time(inputs.len(), |i| {
                weight.forward_measured(inputs[i].clone(), Some(residuals[i].clone()))
            })?;
            rows.push(self.row(case, "+residual", &with_moments, &times, amount));
        }
        Ok(rows)
    }

    fn norm(&self, case: Case, channels: usize, side: usize) -> Result<Vec<OperationRow>> {
        let norm = self.norm_weight(channels);
        let bytes = channels * side * side * DType::from(self.dtype).size();
        let inputs = self.activations(channels, side);
        let times = self.time(inputs.len(), |i| norm.forward_silu(inputs[i].clone()).into())?;
        let mut rows = vec![self.row(case, "", IMPLEMENTATION, &times, Amount::Memory(3 * bytes))];
        if self.delivers_moments(channels, channels) {
            let weight = self.conv_weight(ConvKind::Point, [channels, channels, 1, 1]);
            let measured = |input| weight.forward_measured(input, None);
            let inputs: Vec<_> = inputs.into_iter().map(measured).collect();
            let times = self.time(inputs.len(), |i| norm.forward_silu(inputs[i].clone()).into())?;
            let implementation = format!("{IMPLEMENTATION}, moments known");
            rows.push(self.row(case, "", &implementation, &times, Amount::Memory(2 * bytes)));
        }
        Ok(rows)
    }

    fn attention(&self, case: Case, channels: usize, side: usize) -> Result<Vec<OperationRow>> {
        let norm = self.norm_weight(channels);
        let [query, key, value, out] = [(); 4].map(|()| {
            let weight = self.random([channels, channels], random::variance_of_one_in(channels));
            (weight, self.random([channels], SMALL))
        });
        let block = AttentionWeight::new(norm.clone(), query, key, value, out);
        let projections = self.conv_weight(ConvKind::Point, [3 * channels, channels, 1, 1]);
        let inputs = self.activations(channels, side);
        let tokens = side * side;
        let core = 4 * tokens * tokens * channels;
        let whole = core + 2 * tokens * channels * 3 * channels;

        let of_block = self.time(inputs.len(), |i| block.forward(inputs[i].clone().into()).into())?;
        let of_rest = self.time(inputs.len(), |i| {
            projections.forward(norm.forward(inputs[i].clone())).into()
        })?;
        let rest = of_rest.median();
        let of_core = Times {
            us: of_block.us.iter().map(|us| us - rest).collect(),
            ..of_block
        };
        let mut rows = vec![self.row(case, "", IMPLEMENTATION, &of_block, Amount::Arithmetic(whole))];
        if of_core.us.iter().all(|&us| us > 0.0) {
            rows.push(self.row(case, "_core", IMPLEMENTATION, &of_core, Amount::Arithmetic(core)));
        } else {
            eprintln!(
                "{} {}: norm and projections alone take as long as all",
                case.name(),
                case.shape()
            );
        }
        Ok(rows)
    }

    /// Whether convolutions deliver the moments of their results.
    fn delivers_moments(&self, channels_in: usize, channels_out: usize) -> bool {
        let (engine, _) = self.profile.conv_engine(self.dtype.into(), channels_in, channels_out);
        engine == ConvEngine::Hopper
    }

    fn row(&self, case: Case, variant: &str, implementation: &str, times: &Times, amount: Amount) -> OperationRow {
        let us_median = times.median();
        let (tflops, gb_per_s) = match amount {
            Amount::Arithmetic(operations) => (Some(operations as f64 / us_median / 1e6), None),
            Amount::Memory(bytes) => (None, Some(bytes as f64 / us_median / 1e3)),
        };
        OperationRow {
            operation: format!("{}{variant}", case.name()),
            shape: case.shape(),
            implementation: implementation.to_string(),
            dtype: DType::from(self.dtype).name().into(),
            us_median,
            us_min: times.us.iter().copied().fold(f64::INFINITY, f64::min),
            us_max: times.us.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            tflops,
            gb_per_s,
            calls: times.calls,
            runs: times.us.len(),
            warmups: self.warmups,
            clock_mhz_start: times.clock_mhz_start,
            clock_mhz_end: times.clock_mhz_end,
        }
    }

    /// Times an operation on each of `buffers` buffers in turn.
    fn time(&self, buffers: usize, call: impl Fn(usize) -> Measured) -> Result<Times> {
        let clock = || self.card.as_ref().and_then(Card::clock_mhz);
        let mut calls = Calls {
            call,
            number: 1,
            next: 0,
            results: vec![None; buffers],
            device: &self.device,
        };
        // The first call compiles kernels. A call's time with a synchronise then guesses at the number, and a run of that
        // many at a better one; the fastest of three, because a host that is busy elsewhere would shorten the runs.
        protocol::time(&mut calls, 1)?;
        for _ in 0..2 {
            let fastest = protocol::time(&mut calls, 3)?.into_iter().min().unwrap_or_default();
            let share = RUN.as_secs_f64() / fastest.as_secs_f64().max(1e-9);
            calls.number = (calls.number as f64 * share).ceil().clamp(1.0, MOST_CALLS) as usize;
        }
        protocol::time(&mut calls, self.warmups)?;
        let clock_mhz_start = clock();
        let runs = protocol::time(&mut calls, self.runs)?;
        let clock_mhz_end = clock();
        protocol::check(&mut calls)?;
        calls.check_values()?;
        Ok(Times {
            us: runs
                .iter()
                .map(|run| run.as_secs_f64() * 1e6 / calls.number as f64)
                .collect(),
            calls: calls.number,
            clock_mhz_start,
            clock_mhz_end,
        })
    }

    fn conv_weight(&self, kind: ConvKind, shape: [usize; 4]) -> ConvWeight {
        let weight = self.random(shape, random::variance_of_one_in(shape[1..].iter().product()));
        ConvWeight::new(kind, weight, self.random([shape[0]], SMALL))
    }

    fn norm_weight(&self, channels: usize) -> NormWeight {
        let weight = self.random([channels], Distribution::Uniform(0.8, 1.2));
        NormWeight::new(weight, self.random([channels], SMALL), GROUPS, EPSILON)
    }

    /// As many as it takes for no cache to hold them.
    fn activations(&self, channels: usize, side: usize) -> Vec<Tensor<4>> {
        let bytes = channels * side * side * DType::from(self.dtype).size();
        self.buffers(ROTATED_BYTES.div_ceil(bytes).min(MOST_BUFFERS), channels, side)
    }

    fn buffers(&self, number: usize, channels: usize, side: usize) -> Vec<Tensor<4>> {
        let shape = [1, side, side, channels];
        (0..number)
            .map(|_| self.random(shape, Distribution::Normal(0.0, 1.0)))
            .collect()
    }

    fn random<const D: usize>(&self, shape: [usize; D], distribution: Distribution) -> Tensor<D> {
        Tensor::<D>::random(shape, distribution, &self.device).cast(self.dtype)
    }
}

/// Of biases.
const SMALL: Distribution = Distribution::Uniform(-0.1, 0.1);

/// What an operation has to do at least.
#[derive(Debug, Clone, Copy)]
enum Amount {
    /// Multiplications and additions.
    Arithmetic(usize),
    /// Bytes read and written.
    Memory(usize),
}

/// Microseconds of a call, in each run, and what else a row says of them.
struct Times {
    us: Vec<f64>,
    calls: usize,
    clock_mhz_start: Option<u32>,
    clock_mhz_end: Option<u32>,
}

impl Times {
    fn median(&self) -> f64 {
        let mut sorted = self.us.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        }
    }
}

/// Calls of an operation back to back, with a buffer after the other, whose last results are kept so that new ones do not
/// take their place.
struct Calls<'a, F> {
    call: F,
    number: usize,
    next: usize,
    results: Vec<Option<Measured>>,
    device: &'a Device,
}

impl<F: Fn(usize) -> Measured> Calls<'_, F> {
    fn last(&self) -> Result<Tensor<4>> {
        let index = self.next.checked_sub(1).ok_or("nothing was computed yet")? % self.results.len();
        let result = self.results[index].as_ref().ok_or("nothing was computed yet")?;
        Ok(result.activation().clone())
    }

    /// Refuses results whose values are not finite, by the last row of the last one: arithmetic of NaN may cost less.
    fn check_values(&self) -> Result {
        let result = self.last()?;
        let height = result.dims()[1];
        let row = result
            .slice([0..1, height - 1..height])
            .try_into_data()
            .map_err(device_failed)?;
        match row.iter::<f32>().all(f32::is_finite) {
            true => Ok(()),
            false => Err("its result has values that are not finite".into()),
        }
    }
}

impl<F: Fn(usize) -> Measured> Work for Calls<'_, F> {
    fn run(&mut self) -> Result {
        for _ in 0..self.number {
            let index = self.next % self.results.len();
            self.results[index] = None;
            self.results[index] = Some((self.call)(index));
            self.next += 1;
        }
        self.device.sync().map_err(device_failed)?;
        Ok(())
    }

    fn read(&mut self) -> Result {
        read_last(self.last()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench() -> Bench {
        let device = Device::flex();
        Bench {
            card: None,
            profile: DeviceProfile::of(&device),
            device,
            dtype: FloatDType::F32,
            warmups: 0,
            runs: 2,
        }
    }

    #[test]
    fn rates_are_those_of_the_definition() {
        let bench = bench();
        let times = Times {
            us: vec![3.0, 1.0],
            calls: 5,
            clock_mhz_start: None,
            clock_mhz_end: None,
        };
        let case = Case::Norm(32, 8);
        let row = bench.row(case, "", "high", &times, Amount::Memory(4000));
        assert_eq!((row.us_median, row.us_min, row.us_max), (2.0, 1.0, 3.0));
        assert_eq!((row.gb_per_s, row.tflops), (Some(2.0), None));
        let row = bench.row(case, "", "high", &times, Amount::Arithmetic(6_000_000));
        assert_eq!((row.gb_per_s, row.tflops), (None, Some(3.0)));
    }

    #[test]
    fn the_arithmetic_of_a_row_is_that_of_its_shape() {
        // 10^12 operations a second are 10^6 in a microsecond.
        let arithmetic = |case| {
            let rows = bench().rows(case).unwrap();
            rows.iter()
                .map(|row| (row.tflops.unwrap() * row.us_median * 1e6).round())
                .collect::<Vec<_>>()
        };
        let conv = |kind, channels| arithmetic(Case::Conv(kind, channels, 4));
        assert_eq!(conv(ConvKind::Square, [8, 32]), [2.0 * 16.0 * 256.0 * 9.0; 2]);
        assert_eq!(conv(ConvKind::Square, [8, 3]), [2.0 * 16.0 * 24.0 * 9.0]);
        assert_eq!(conv(ConvKind::Point, [8, 32]), [2.0 * 16.0 * 256.0]);
        assert_eq!(conv(ConvKind::Upsample, [8, 32]), [2.0 * 64.0 * 256.0 * 4.0]);
        let core = 4.0 * 256.0 * 32.0;
        let attention = arithmetic(Case::Attention(32, 4));
        assert_eq!(attention[0], core + 2.0 * 16.0 * 32.0 * 96.0);
        // Left out where the projections alone took longer than all of it, as they may on a busy machine.
        assert!(attention[1..].iter().all(|&row| row == core), "{attention:?}");
    }

    #[test]
    fn every_call_takes_the_next_buffer_and_results_are_kept_until_their_buffer_s_turn() {
        let device = Device::flex();
        let mut calls = Calls {
            call: |index: usize| Tensor::<4>::full([1, 1, 1, 1], index as f32, &device).into(),
            number: 4,
            next: 0,
            results: vec![None; 3],
            device: &device,
        };
        let values = |calls: &Calls<_>| {
            let value = |result: &Option<Measured>| result.as_ref().unwrap().activation().clone().into_scalar::<f32>();
            calls.results.iter().map(value).collect::<Vec<_>>()
        };
        calls.run().unwrap();
        assert_eq!(values(&calls), [0.0, 1.0, 2.0]);
        assert_eq!((calls.next, calls.last().unwrap().into_scalar::<f32>()), (4, 0.0));
    }

    #[test]
    fn results_that_are_not_finite_are_refused() {
        let device = Device::flex();
        let nan = |_| Tensor::<4>::full([1, 2, 1, 1], f32::NAN, &device).into();
        let error = bench().time(1, nan).err().unwrap().to_string();
        assert_eq!(error, "its result has values that are not finite");
    }
}
