//! Weights of convolutions laid out for the kernels: one pass, whatever the fold.

use cubecl::{prelude::*, server::Handle};

use super::launch::buffer;
use crate::fused::ConvKind;

/// Units of a cube.
const UNITS: u32 = 256;

/// `[channels_out, channels_in, kernel, kernel]` to `[phases^2, channels_out, taps^2, channels_in]`, a unit an element. A
/// phase of the doubled image sees pairs of equal pixels: its 2 taps an axis are sums of the kernel's 3, in f32.
#[cube(launch_unchecked, address_type = "dynamic")]
fn pack_kernel<W: Float, E: Float>(
    weight: &[W],
    packed: &mut [E],
    length: u32,
    channels_out: u32,
    channels_in: u32,
    #[comptime] kernel: u32,
    #[comptime] taps: u32,
    #[comptime] phases: u32,
    #[define(W)] _weight_dtype: ElemType,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS as u32;
    if at < length {
        let channel_in = at % channels_in;
        let tap = at / channels_in % comptime!(taps * taps);
        let row = at / (channels_in * comptime!(taps * taps));
        let phase = row / channels_out;
        let filter = (row % channels_out * channels_in + channel_in) * comptime!(kernel * kernel);
        let mut sum = 0.0f32;
        #[unroll]
        for y in 0..kernel {
            #[unroll]
            for x in 0..kernel {
                let sees = tap_of(y, phase / phases, taps, phases) == tap / taps
                    && tap_of(x, phase % phases, taps, phases) == tap % taps;
                if sees {
                    sum += f32::cast_from(weight[(filter + comptime!(y * kernel + x)) as usize]);
                }
            }
        }
        packed[at as usize] = E::cast_from(sum);
    }
}

/// The tap that the kernel's row or column `k` falls on in a phase: `{0}, {1, 2}` in phase 0 and `{0, 1}, {2}` in phase 1.
#[cube]
fn tap_of(#[comptime] k: u32, phase: u32, #[comptime] taps: u32, #[comptime] phases: u32) -> u32 {
    if comptime!(phases == 1 || taps == 1) {
        k.runtime()
    } else {
        (k + 1 - phase) / 2
    }
}

/// Lays out a weight of `[channels_out, channels_in, k, k]` as rows of `taps^2 * channels_in`.
pub(super) fn pack(
    client: &Client,
    kind: ConvKind,
    [channels_out, channels_in]: [usize; 2],
    (weight, weight_dtype): (&Handle, ElemType),
    (packed, dtype): (&Handle, ElemType),
) {
    let (phases, taps) = (kind.phases(), kind.taps());
    let kernel = if kind == ConvKind::Point { 1 } else { 3 };
    let length = phases * phases * channels_out * taps * taps * channels_in;
    let weights = channels_out * channels_in * kernel * kernel;
    // Safety: units beyond `length` do nothing, and a filter's elements are those of the weight.
    unsafe {
        pack_kernel::launch_unchecked(
            client,
            CubeCount::Static(length.div_ceil(UNITS as usize) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            AddressType::U32,
            buffer(weight, weights),
            buffer(packed, length),
            length as u32,
            channels_out as u32,
            channels_in as u32,
            kernel as u32,
            taps as u32,
            phases as u32,
            weight_dtype,
            dtype,
        )
    }
}

/// The kernel, as CUDA C++.
#[cfg(all(test, feature = "hopper"))]
pub(super) fn emit_all() {
    use super::emit::{device_properties, emit, settings, target_properties};
    use cubecl::ir::FloatKind;

    let argument = || BufferCompilationArg { inplace: None };
    let dtype = ElemType::Float(FloatKind::BF16);
    for (name, kernel, taps, phases) in [("point", 1, 1, 1), ("square", 3, 3, 1), ("upsample", 3, 2, 2)] {
        let kernel = pack_kernel::PackKernel::new(
            settings(CubeDim::new_1d(UNITS)),
            device_properties(),
            target_properties(),
            argument(),
            argument(),
            (),
            (),
            (),
            kernel,
            taps,
            phases,
            dtype,
            dtype,
        );
        emit(&format!("pack_{name}"), &kernel);
    }
}
