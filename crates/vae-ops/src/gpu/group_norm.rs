//! GroupNorm over channels-last activations: partial moments, coefficients, apply.
//!
//! Moments are separable: whatever produces an activation may deliver them in the form of [`Moments`] instead of
//! [`channel_moments`], and two passes over memory become one.

use cubecl::{prelude::*, server::Handle};

use super::launch::{Rows, buffer, vector_size};
use crate::fused::NormSpec;

/// Planes of a moments buffer: for each part of the rows and each channel their count, mean, and sum of squared
/// deviations from that mean.
pub(super) const MOMENTS: usize = 3;
/// Planes of a coefficients buffer: for each channel the mean, the scale and the shift of `(x - mean) * scale + shift`.
const COEFFICIENTS: usize = 3;

/// Units of a cube of these kernels.
const UNITS: u32 = 256;
/// Cubes that keep a large device busy; more parts would only cost more merging.
const TARGET_CUBES: usize = 1024;
/// Units that load together.
const WARP: u32 = 32;
/// Loads of a unit in flight.
const UNROLL: u32 = 4;

/// Partial moments of `[batch, rows, channels]` on the device: `[batch, parts, 3, channels]` in f32.
pub(super) struct Moments {
    pub handle: Handle,
    pub parts: usize,
}

/// Each cube takes the rows of one part; each unit takes every `CUBE_DIM_Y`-th of them for one vector of channels.
#[cube(launch_unchecked, address_type = "dynamic")]
fn channel_moments_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    moments: &mut [Vector<f32, V>],
    rows: u32,
    row_vectors: u32,
    rows_per_part: u32,
    #[comptime] lanes: u32,
    #[comptime] row_lanes: u32,
    #[define(E)] _dtype: ElemType,
) {
    let column = CUBE_POS_Z * lanes + UNIT_POS_X;
    let first = CUBE_POS_X * rows_per_part;
    let end = u32::min(first + rows_per_part, rows);
    let start = first + UNIT_POS_Y;
    let in_range = column < row_vectors;

    let mut shift = Vector::<f32, V>::new(0.0);
    let mut sum = Vector::<f32, V>::new(0.0);
    let mut squares = Vector::<f32, V>::new(0.0);
    let mut count = 0u32;
    if in_range && start < end {
        let base = CUBE_POS_Y as usize * rows as usize * row_vectors as usize + column as usize;
        // Deviations from the first value, so that a mean far from zero costs no digits.
        shift = Vector::cast_from(x[base + start as usize * row_vectors as usize]);
        count = (end - start).div_ceil(row_lanes);
        let step = row_lanes as usize * row_vectors as usize;
        let first = base + start as usize * row_vectors as usize;
        // Loads of a block of rows are in flight together.
        let blocks = count / UNROLL;
        for block in 0..blocks {
            let at = first + (block * UNROLL) as usize * step;
            let mut values = Array::<Vector<E, V>>::new(comptime!(UNROLL as usize));
            #[unroll]
            for i in 0..comptime!(UNROLL as usize) {
                values[i] = x[at + i * step];
            }
            #[unroll]
            for i in 0..comptime!(UNROLL as usize) {
                let value = Vector::<f32, V>::cast_from(values[i]) - shift;
                sum += value;
                squares += value * value;
            }
        }
        for i in blocks * UNROLL..count {
            let value = Vector::<f32, V>::cast_from(x[first + i as usize * step]) - shift;
            sum += value;
            squares += value * value;
        }
    }
    let n = Vector::<f32, V>::new(f32::cast_from(u32::max(count, 1)));
    let mean = shift + sum / n;
    let m2 = squares - sum * sum / n;

    let mut means = Shared::<[Vector<f32, V>]>::new_slice(comptime!((lanes * row_lanes) as usize));
    let mut m2s = Shared::<[Vector<f32, V>]>::new_slice(comptime!((lanes * row_lanes) as usize));
    means[UNIT_POS as usize] = mean;
    m2s[UNIT_POS as usize] = m2;
    sync_cube();

    if UNIT_POS_Y == 0 && in_range {
        let mut total = f32::cast_from(count);
        let mut mean = mean;
        let mut m2 = m2;
        for lane in 1..row_lanes {
            if first + lane < end {
                let other_count = f32::cast_from((end - first - lane).div_ceil(row_lanes));
                let other = (lane * lanes + UNIT_POS_X) as usize;
                let delta = means[other] - mean;
                let all = total + other_count;
                mean += delta * Vector::new(other_count / all);
                m2 += m2s[other] + delta * delta * Vector::new(total * other_count / all);
                total = all;
            }
        }
        let part = CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize;
        let out = part * comptime!(MOMENTS) * row_vectors as usize + column as usize;
        moments[out] = Vector::new(total);
        moments[out + row_vectors as usize] = mean;
        moments[out + 2 * row_vectors as usize] = m2;
    }
}

/// Adds up the moments of a group over its channels and parts; one cube a group and batch. A part may be empty.
///
/// A unit takes means as deviations from the first it meets, so that its sums need no division and lose no digits to a
/// mean far from zero: `m2 = sum(m2_i + n_i d_i^2) - (sum n_i d_i)^2 / n`. Units are merged pairwise.
#[cube(launch_unchecked, address_type = "dynamic")]
fn group_coefficients_kernel(
    moments: &[f32],
    weight: &[f32],
    bias: &[f32],
    coefficients: &mut [f32],
    parts: u32,
    channels: u32,
    group_channels: u32,
    epsilon: f32,
    // WGSL cannot spell it.
    nan: f32,
    #[comptime] units: u32,
) {
    let first_channel = CUBE_POS_X * group_channels;
    let plane = channels as usize;
    let base = (CUBE_POS_Y * parts) as usize * comptime!(MOMENTS) * plane + first_channel as usize;
    let mut shift = 0.0f32;
    let mut count = 0.0f32;
    let mut sum = 0.0f32;
    let mut squares = 0.0f32;
    // Units share the channels first, then the parts.
    let lanes = u32::max(units / group_channels, 1);
    let lane = UNIT_POS / group_channels;
    let mut end = group_channels;
    if lane >= lanes || lane >= parts {
        end = 0u32;
    }
    for channel in range_stepped(UNIT_POS % group_channels, end, units) {
        let step = lanes as usize * comptime!(MOMENTS) * plane;
        let first = base + lane as usize * comptime!(MOMENTS) * plane + channel as usize;
        let items = (parts - lane).div_ceil(lanes);
        let blocks = items / UNROLL;
        for block in 0..blocks {
            let at = first + (block * UNROLL) as usize * step;
            let mut loaded = Array::<f32>::new(comptime!(UNROLL as usize * MOMENTS));
            #[unroll]
            for i in 0..comptime!(UNROLL as usize * MOMENTS) {
                loaded[i] = moments[at + comptime!(i / MOMENTS) * step + comptime!(i % MOMENTS) * plane];
            }
            #[unroll]
            for i in 0..comptime!(UNROLL as usize) {
                let n = loaded[comptime!(i * MOMENTS)];
                let mean = loaded[comptime!(i * MOMENTS + 1)];
                if count == 0.0 {
                    shift = mean;
                }
                let deviation = mean - shift;
                count += n;
                sum += n * deviation;
                squares += loaded[comptime!(i * MOMENTS + 2)] + n * deviation * deviation;
            }
        }
        for i in blocks * UNROLL..items {
            let at = first + i as usize * step;
            let n = moments[at];
            let mean = moments[at + plane];
            if count == 0.0 {
                shift = mean;
            }
            let deviation = mean - shift;
            count += n;
            sum += n * deviation;
            squares += moments[at + 2 * plane] + n * deviation * deviation;
        }
    }
    let safe = f32::max(count, 1.0);
    let mut counts = Shared::<[f32]>::new_slice(comptime!(units as usize));
    let mut means = Shared::<[f32]>::new_slice(comptime!(units as usize));
    let mut m2s = Shared::<[f32]>::new_slice(comptime!(units as usize));
    let unit = UNIT_POS as usize;
    counts[unit] = count;
    means[unit] = shift + sum / safe;
    m2s[unit] = squares - sum * sum / safe;
    sync_cube();
    let mut stride = comptime!(units / 2).runtime();
    while stride > 0 {
        if UNIT_POS < stride {
            let other = (UNIT_POS + stride) as usize;
            let count = counts[unit];
            let all = count + counts[other];
            let share = counts[other] / f32::max(all, 1.0);
            let delta = means[other] - means[unit];
            m2s[unit] += m2s[other] + delta * delta * count * share;
            means[unit] += delta * share;
            counts[unit] = all;
        }
        sync_cube();
        stride /= 2;
    }

    let mean = means[0];
    let variance = f32::max(m2s[0] / counts[0], 0.0);
    // An overflow must show in the image, not become zeros.
    let mut deviation_inverse = nan;
    if m2s[0] < 3.0e38 {
        deviation_inverse = 1.0 / f32::sqrt(variance + epsilon);
    }
    for item in range_stepped(UNIT_POS, group_channels, units) {
        let channel = first_channel + item;
        let out = (CUBE_POS_Y * comptime!(COEFFICIENTS as u32) * channels + channel) as usize;
        coefficients[out] = mean;
        coefficients[out + channels as usize] = weight[channel as usize] * deviation_inverse;
        coefficients[out + 2 * channels as usize] = bias[channel as usize];
    }
}

/// What follows a normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Activation {
    None,
    Silu,
    /// SiLU by an NVIDIA card's own exponential and reciprocal: exact to some 4 units in the last place of f32, in a third
    /// of the instructions, so that memory is what takes time.
    SiluPtx,
}

#[cube]
fn silu_ptx(x: f32) -> f32 {
    let y: f32;
    gpu_asm!(
        "{{ .reg .f32 t; mul.f32 t, {x}, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 {y}, {x}, t; }}",
        y = out(_) y, x = in(_) f32::cast_from(x)
    );
    y
}

/// `(x - mean) * scale + shift`, then SiLU if asked.
#[cube]
fn normalize<E: Float, V: Size>(
    x: Vector<E, V>,
    mean: Vector<f32, V>,
    scale: Vector<f32, V>,
    shift: Vector<f32, V>,
    #[comptime] activation: Activation,
) -> Vector<E, V> {
    let mut value = (Vector::<f32, V>::cast_from(x) - mean) * scale + shift;
    if comptime!(activation == Activation::SiluPtx) {
        let mut result = Vector::<f32, V>::empty();
        #[unroll]
        for i in 0..value.vector_size() {
            result.insert(i, silu_ptx(value.extract(i)));
        }
        value = result;
    } else if comptime!(activation == Activation::Silu) {
        value /= Vector::exp(-value) + Vector::new(1.0);
    }
    Vector::cast_from(value)
}

/// Applies the coefficients to every row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn normalize_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    coefficients: &[Vector<f32, V>],
    y: &mut [Vector<E, V>],
    rows: u32,
    row_vectors: u32,
    rows_per_cube: u32,
    lanes: u32,
    row_lanes: u32,
    #[comptime] activation: Activation,
    #[define(E)] _dtype: ElemType,
) {
    let column = CUBE_POS_Z * lanes + UNIT_POS % lanes;
    let row_lane = UNIT_POS / lanes;
    if row_lane < row_lanes && column < row_vectors {
        let first = CUBE_POS_X * rows_per_cube;
        let end = u32::min(first + rows_per_cube, rows);
        let plane = row_vectors as usize;
        let coefficient = CUBE_POS_Y as usize * comptime!(COEFFICIENTS) * plane + column as usize;
        let mean = coefficients[coefficient];
        let scale = coefficients[coefficient + plane];
        let shift = coefficients[coefficient + 2 * plane];
        let base = CUBE_POS_Y as usize * rows as usize * plane + column as usize;
        let start = first + row_lane;
        if start < end {
            let items = (end - start).div_ceil(row_lanes);
            let step = row_lanes as usize * plane;
            let first = base + start as usize * plane;
            let blocks = items / UNROLL;
            for block in 0..blocks {
                let at = first + (block * UNROLL) as usize * step;
                let mut values = Array::<Vector<E, V>>::new(comptime!(UNROLL as usize));
                #[unroll]
                for i in 0..comptime!(UNROLL as usize) {
                    values[i] = x[at + i * step];
                }
                #[unroll]
                for i in 0..comptime!(UNROLL as usize) {
                    y[at + i * step] = normalize(values[i], mean, scale, shift, activation);
                }
            }
            for i in blocks * UNROLL..items {
                let at = first + i as usize * step;
                y[at] = normalize(x[at], mean, scale, shift, activation);
            }
        }
    }
}

/// How units share the channels of a row: vectors side by side, then rows. Where warps cross rows, as many rows as whole
/// warps have, so that their loads stay aligned.
fn lanes(row_vectors: usize) -> (u32, u32) {
    let lanes = (row_vectors as u32).min(64);
    let rows = UNITS / lanes;
    let aligned = (WARP / (1 << lanes.trailing_zeros())).max(1);
    (lanes, if rows > aligned { rows / aligned * aligned } else { rows })
}

/// Partial moments of every channel of `x`.
pub(super) fn channel_moments(client: &Client, x: &Rows) -> Moments {
    let vector = vector_size(client, x.dtype, x.channels);
    let row_vectors = x.channels / vector;
    let (lanes, row_lanes) = lanes(row_vectors);
    let blocks = row_vectors.div_ceil(lanes as usize);
    let parts = (TARGET_CUBES / (x.batch * blocks)).clamp(1, x.rows.div_ceil(row_lanes as usize));
    let rows_per_part = x.rows.div_ceil(parts);
    let parts = x.rows.div_ceil(rows_per_part);
    let moments = client.empty(x.batch * parts * MOMENTS * x.channels * size_of::<f32>());
    let values = x.batch * parts * MOMENTS * row_vectors;
    // Safety: indices stay below the lengths given, which are those of the allocations.
    unsafe {
        channel_moments_kernel::launch_unchecked(
            client,
            CubeCount::Static(parts as u32, x.batch as u32, blocks as u32),
            CubeDim::new_2d(lanes, row_lanes),
            x.address_type(),
            vector,
            buffer(&x.handle, x.len() / vector),
            buffer(&moments, values),
            x.rows as u32,
            row_vectors as u32,
            rows_per_part as u32,
            lanes,
            row_lanes,
            x.dtype,
        )
    }
    Moments { handle: moments, parts }
}

/// Normalises `x` with its own moments into `y`, or in place without one.
pub(super) fn group_norm(
    client: &Client,
    x: &Rows,
    moments: &Moments,
    [weight, bias]: [&Handle; 2],
    NormSpec { groups, epsilon, silu }: NormSpec,
    y: Option<&Handle>,
    inline_assembly: bool,
) {
    let activation = match (silu, inline_assembly) {
        (false, _) => Activation::None,
        (true, false) => Activation::Silu,
        (true, true) => Activation::SiluPtx,
    };
    let coefficients = client.empty(x.batch * COEFFICIENTS * x.channels * size_of::<f32>());
    let vector = vector_size(client, x.dtype, x.channels);
    let row_vectors = x.channels / vector;
    // One group is one cube, so a cube as large as the device has; a power of two, because it is halved.
    let most = client.properties().hardware.max_units_per_cube;
    let units = [1024, 512].into_iter().find(|&units| units <= most).unwrap_or(UNITS);
    // Safety: as above.
    unsafe {
        group_coefficients_kernel::launch_unchecked(
            client,
            CubeCount::Static(groups as u32, x.batch as u32, 1),
            CubeDim::new_1d(units),
            AddressType::U32,
            buffer(&moments.handle, x.batch * moments.parts * MOMENTS * x.channels),
            buffer(weight, x.channels),
            buffer(bias, x.channels),
            buffer(&coefficients, x.batch * COEFFICIENTS * x.channels),
            moments.parts as u32,
            x.channels as u32,
            (x.channels / groups) as u32,
            epsilon,
            f32::NAN,
            units,
        );
        let (lanes, row_lanes) = lanes(row_vectors);
        let blocks = row_vectors.div_ceil(lanes as usize);
        let cubes = (4 * TARGET_CUBES / (x.batch * blocks)).clamp(1, x.rows.div_ceil(row_lanes as usize));
        let rows_per_cube = x.rows.div_ceil(cubes);
        normalize_kernel::launch_unchecked(
            client,
            CubeCount::Static(x.rows.div_ceil(rows_per_cube) as u32, x.batch as u32, blocks as u32),
            CubeDim::new_1d(UNITS),
            x.address_type(),
            vector,
            buffer(&x.handle, x.len() / vector),
            buffer(&coefficients, x.batch * COEFFICIENTS * row_vectors),
            match y {
                Some(y) => buffer(y, x.len() / vector),
                None => BufferArg::Alias {
                    input_pos: 0,
                    length: [x.len() / vector],
                },
            },
            x.rows as u32,
            row_vectors as u32,
            rows_per_cube as u32,
            lanes,
            row_lanes,
            activation,
            x.dtype,
        )
    }
}

/// The kernels, as CUDA C++.
#[cfg(all(test, feature = "hopper"))]
pub(super) fn emit_all() {
    use super::emit::{device_properties, emit, settings, target_properties};
    use cubecl::ir::FloatKind;

    let argument = || BufferCompilationArg { inplace: None };
    let (lanes, row_lanes) = lanes(16);
    for (name, float, vector) in [
        ("f32", FloatKind::F32, 4),
        ("f16", FloatKind::F16, 8),
        ("bf16", FloatKind::BF16, 8),
    ] {
        let dtype = ElemType::Float(float);
        let kernel = channel_moments_kernel::ChannelMomentsKernel::new(
            settings(CubeDim::new_2d(lanes, row_lanes)),
            device_properties(),
            target_properties(),
            argument(),
            argument(),
            (),
            (),
            (),
            vector,
            lanes,
            row_lanes,
            dtype,
        );
        emit(&format!("channel_moments_{name}"), &kernel);
        for (place, inplace) in [("apart", None), ("in_place", Some(0))] {
            let kernel = normalize_kernel::NormalizeKernel::new(
                settings(CubeDim::new_1d(UNITS)),
                device_properties(),
                target_properties(),
                argument(),
                argument(),
                BufferCompilationArg { inplace },
                (),
                (),
                (),
                (),
                (),
                vector,
                Activation::SiluPtx,
                dtype,
            );
            emit(&format!("normalize_{name}_{place}"), &kernel);
        }
    }
    let kernel = group_coefficients_kernel::GroupCoefficientsKernel::new(
        settings(CubeDim::new_1d(1024)),
        device_properties(),
        target_properties(),
        argument(),
        argument(),
        argument(),
        argument(),
        (),
        (),
        (),
        (),
        (),
        1024,
    );
    emit("group_coefficients", &kernel);
}
