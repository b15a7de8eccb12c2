//! Rows of attention scores to unnormalised probabilities and their sums.

use cubecl::{prelude::*, server::Handle};

use super::launch::buffer;

const UNITS: u32 = 256;

/// `exp((s - max s) * scale)` of each row, and the row's sum of what was stored; one cube a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn softmax_kernel<E: Float>(
    scores: &[f32],
    probabilities: &mut [E],
    sums: &mut [f32],
    columns: u32,
    stride: u32,
    scale: f32,
    #[comptime] units: u32,
    #[define(E)] _dtype: ElemType,
) {
    let unit = UNIT_POS as usize;
    let base = CUBE_POS_X as usize * stride as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units as usize));

    let mut largest = f32::new(f32::MIN);
    for column in range_stepped(UNIT_POS, columns, units) {
        largest = f32::max(largest, scores[base + column as usize]);
    }
    shared[unit] = largest;
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            shared[unit] = f32::max(shared[unit], shared[(UNIT_POS + half) as usize]);
        }
        sync_cube();
        half /= 2;
    }
    let largest = shared[0];
    sync_cube();

    let mut sum = 0.0f32;
    for column in range_stepped(UNIT_POS, stride, units) {
        let mut probability = E::from_int(0);
        if column < columns {
            probability = E::cast_from(f32::exp((scores[base + column as usize] - largest) * scale));
        }
        // What is rounded is what is summed, so that the weights of a row add up to one.
        sum += f32::cast_from(probability);
        probabilities[base + column as usize] = probability;
    }
    shared[unit] = sum;
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if UNIT_POS < half {
            shared[unit] += shared[(UNIT_POS + half) as usize];
        }
        sync_cube();
        half /= 2;
    }
    if UNIT_POS == 0 {
        sums[CUBE_POS_X as usize] = shared[0];
    }
}

/// `scores` and `probabilities` are `[rows, stride]`; columns from `columns` on become zero. Rows have a cube each.
pub(super) fn softmax(
    client: &Client,
    scores: &Handle,
    probabilities: &Handle,
    sums: &Handle,
    [rows, columns, stride]: [usize; 3],
    scale: f32,
    dtype: ElemType,
) {
    // Safety: a cube stays in its row.
    unsafe {
        softmax_kernel::launch_unchecked(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            AddressType::from_len(rows * stride),
            buffer(scores, rows * stride),
            buffer(probabilities, rows * stride),
            buffer(sums, rows),
            columns as u32,
            stride as u32,
            scale,
            UNITS,
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
    let kernel = softmax_kernel::SoftmaxKernel::new(
        settings(CubeDim::new_1d(UNITS)),
        device_properties(),
        target_properties(),
        argument(),
        argument(),
        argument(),
        (),
        (),
        (),
        UNITS,
        ElemType::Float(FloatKind::BF16),
    );
    emit("softmax", &kernel);
}
