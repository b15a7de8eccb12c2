//! The instructions of sm_90a that CubeCL has no words for, as small functions.
//!
//! Shared memory is addressed in bytes by `u32`, barriers are mbarriers in it. An operand is passed as `T::cast_from(..)`,
//! which costs nothing: a mutable variable would reach the assembler as a pointer.

use cubecl::prelude::*;

/// Bytes of one row of a swizzled tile, and channels in it: the widest swizzle of TMA and wgmma.
pub(super) const ROW_BYTES: u32 = 128;
pub(super) const ROW_CHANNELS: u32 = 64;
/// Bytes of an mbarrier.
pub(super) const BARRIER_BYTES: u32 = 8;
/// Depth of one wgmma of 16-bit operands.
pub(super) const MMA_DEPTH: u32 = 16;

/// High bits of a wgmma descriptor: 128-byte swizzle, 1024 bytes from one group of 8 rows to the next, k contiguous.
pub(super) const DESCRIPTOR: u64 = 0x4000_0040_0001_0000;

/// A 16-bit float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gpu) enum Half {
    F16,
    Bf16,
}

impl Half {
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// The descriptor of a tile in shared memory. Bits above the address window belong to clusters and are masked.
#[cube]
pub(super) fn descriptor(address: u32) -> u64 {
    comptime!(DESCRIPTOR).runtime() + u64::cast_from((address & 0x3ffff) >> 4)
}

/// High bits of a wgmma descriptor of a transposed operand: 128-byte swizzle, 1024 bytes from one group of 8 rows of k to the
/// next, the other dimension contiguous.
const DESCRIPTOR_TRANSPOSED: u64 = 0x4000_0040_0000_0000;

/// The descriptor of a transposed operand of boxes side by side, each 128 bytes wide and `box_bytes` after the last.
#[cube]
pub(super) fn descriptor_transposed(address: u32, #[comptime] box_bytes: u32) -> u64 {
    comptime!(DESCRIPTOR_TRANSPOSED + ((box_bytes as u64 >> 4) << 16)).runtime()
        + u64::cast_from((address & 0x3ffff) >> 4)
}

#[cube]
pub(super) fn barrier_init(barrier: u32, count: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{b}], {c};", b = in(_) u32::cast_from(barrier), c = in(_) u32::cast_from(count));
}

/// Makes initialised barriers visible to the asynchronous proxy.
#[cube]
pub(super) fn barrier_init_fence() {
    gpu_asm!("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;");
}

#[cube]
pub(super) fn barrier_wait(barrier: u32, phase: u32) {
    gpu_asm!(
        "{{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [{b}], {ph}; @!p bra WAIT; }}",
        b = in(_) u32::cast_from(barrier), ph = in(_) u32::cast_from(phase)
    );
}

#[cube]
pub(super) fn barrier_arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(_) u32::cast_from(barrier));
}

/// Arrives, and makes the barrier wait for `bytes` of TMA loads.
#[cube]
pub(super) fn barrier_expect(barrier: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {c};",
        b = in(_) u32::cast_from(barrier), c = in(_) u32::cast_from(bytes)
    );
}

/// Loads a box of a matrix; `column` is the contiguous coordinate.
#[cube]
pub(super) fn tma_load_2d(to: u32, map: u64, column: i32, row: i32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{m}, {{{c}, {r}}}], [{b}];",
        d = in(_) u32::cast_from(to), m = in(_) u64::cast_from(map), c = in(_) i32::cast_from(column), r = in(_) i32::cast_from(row), b = in(_) u32::cast_from(barrier)
    );
}

/// Loads a box of a channels-last image. Coordinates outside read zeros.
#[cube]
pub(super) fn tma_load_image(to: u32, map: u64, channel: i32, x: i32, y: i32, image: i32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{m}, {{{c}, {x}, {y}, {n}}}], [{b}];",
        d = in(_) u32::cast_from(to), m = in(_) u64::cast_from(map), c = in(_) i32::cast_from(channel), x = in(_) i32::cast_from(x), y = in(_) i32::cast_from(y), n = in(_) i32::cast_from(image), b = in(_) u32::cast_from(barrier)
    );
}

/// Stores a box of a channels-last image; what lies outside is dropped. Commits a group.
#[cube]
pub(super) fn tma_store_image(from: u32, map: u64, channel: i32, x: i32, y: i32, image: i32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [{m}, {{{c}, {x}, {y}, {n}}}], [{s}]; cp.async.bulk.commit_group;",
        s = in(_) u32::cast_from(from), m = in(_) u64::cast_from(map), c = in(_) i32::cast_from(channel), x = in(_) i32::cast_from(x), y = in(_) i32::cast_from(y), n = in(_) i32::cast_from(image)
    );
}

/// Stores a box of one phase of a doubled image, seen as `[y, phase_y, x, phase_x, channel]`. Commits a group.
#[cube]
pub(super) fn tma_store_phase(from: u32, map: u64, channel: i32, phase_x: i32, x: i32, phase_y: i32, y: i32) {
    gpu_asm!(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [{m}, {{{c}, {px}, {x}, {py}, {y}}}], [{s}]; cp.async.bulk.commit_group;",
        s = in(_) u32::cast_from(from), m = in(_) u64::cast_from(map), c = in(_) i32::cast_from(channel), px = in(_) i32::cast_from(phase_x), x = in(_) i32::cast_from(x), py = in(_) i32::cast_from(phase_y), y = in(_) i32::cast_from(y)
    );
}

/// Waits until this thread's committed stores have read shared memory.
#[cube]
pub(super) fn tma_store_wait_read() {
    gpu_asm!("cp.async.bulk.wait_group.read 0;");
}

/// Waits until this thread's committed stores are done.
#[cube]
pub(super) fn tma_store_wait() {
    gpu_asm!("cp.async.bulk.wait_group 0;");
}

/// Makes this thread's writes to shared memory visible to TMA.
#[cube]
pub(super) fn async_proxy_fence() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Rounds two f32 into one register, `low` in its low half.
#[cube]
pub(super) fn pack(low: f32, high: f32, #[comptime] half: Half) -> u32 {
    let name = comptime!(half.name());
    let packed: u32;
    gpu_asm!("cvt.rn.{name}x2.f32 {r}, {h}, {l};", r = out(_) packed, h = in(_) f32::cast_from(high), l = in(_) f32::cast_from(low));
    packed
}

/// The low value of a packed pair.
#[cube]
pub(super) fn unpack_low(packed: u32, #[comptime] half: Half) -> f32 {
    let value: f32;
    if comptime!(half == Half::Bf16) {
        gpu_asm!("{{ .reg .b32 t; shl.b32 t, {p}, 16; mov.b32 {r}, t; }}", r = out(_) value, p = in(_) u32::cast_from(packed));
    } else {
        gpu_asm!("{{ .reg .b16 l, h; mov.b32 {{l, h}}, {p}; cvt.f32.f16 {r}, l; }}", r = out(_) value, p = in(_) u32::cast_from(packed));
    }
    value
}

/// The high value of a packed pair.
#[cube]
pub(super) fn unpack_high(packed: u32, #[comptime] half: Half) -> f32 {
    let value: f32;
    if comptime!(half == Half::Bf16) {
        gpu_asm!("{{ .reg .b32 t; and.b32 t, {p}, 0xffff0000; mov.b32 {r}, t; }}", r = out(_) value, p = in(_) u32::cast_from(packed));
    } else {
        gpu_asm!("{{ .reg .b16 l, h; mov.b32 {{l, h}}, {p}; cvt.f32.f16 {r}, h; }}", r = out(_) value, p = in(_) u32::cast_from(packed));
    }
    value
}

/// Stores four 8x8 matrices of packed pairs, transposed; each lane gives the address of one row.
#[cube]
pub(super) fn store_matrix_transposed(address: u32, a: u32, b: u32, c: u32, d: u32) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [{p}], {{{a}, {b}, {c}, {d}}};",
        p = in(_) u32::cast_from(address), a = in(_) u32::cast_from(a), b = in(_) u32::cast_from(b), c = in(_) u32::cast_from(c), d = in(_) u32::cast_from(d)
    );
}

/// What [`store_matrix_transposed`] stored.
#[cube]
pub(super) fn load_matrix_transposed<N: Size>(address: u32) -> Vector<u32, N> {
    let values: Vector<u32, N>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {{%0, %1, %2, %3}}, [{p}]; /* {d} */",
        d = out(_) values, p = in(_) u32::cast_from(address)
    );
    values
}

/// The low or the high value of a packed pair.
#[cube]
pub(super) fn unpack(packed: u32, #[comptime] high: bool, #[comptime] half: Half) -> f32 {
    if comptime!(high) {
        unpack_high(packed, half)
    } else {
        unpack_low(packed, half)
    }
}

/// Reads 16 bytes.
#[cube]
pub(super) fn load_shared<N: Size>(address: u32) -> Vector<u32, N> {
    let words: Vector<u32, N>;
    gpu_asm!("ld.shared::cta.v4.u32 {{%0, %1, %2, %3}}, [{p}]; /* {d} */", d = out(_) words, p = in(_) u32::cast_from(address));
    words
}

/// The value of the lane whose number differs by `mask`.
#[cube]
pub(super) fn shuffle_xor(value: f32, #[comptime] mask: u32) -> f32 {
    let other: f32;
    gpu_asm!(
        "{{ .reg .b32 t; mov.b32 t, {v}; shfl.sync.bfly.b32 t, t, {mask}, 31, 0xffffffff; mov.b32 {r}, t; }}",
        r = out(_) other, v = in(_) f32::cast_from(value)
    );
    other
}

/// The global address of an element of rows of `length` values, in 64 bits throughout.
#[cube]
pub(super) fn element_address(start: *mut f32, row: u32, #[comptime] length: u32, column: u32) -> u64 {
    let bytes = comptime!(length * size_of::<f32>() as u32);
    let address: u64;
    // The result is written last, because it may share a register with an operand.
    gpu_asm!(
        "{{ .reg .b64 t, u; mul.wide.u32 t, {r}, {bytes}; mul.wide.u32 u, {c}, 4; add.u64 t, t, u; add.u64 {a}, t, {s}; }}",
        a = out(_) address, s = in(_) start, r = in(_) u32::cast_from(row), c = in(_) u32::cast_from(column)
    );
    address
}

/// Stores two neighbours `bytes` after a global address.
#[cube]
pub(super) fn store_pair(address: u64, #[comptime] bytes: u32, first: f32, second: f32) {
    gpu_asm!(
        "st.global.v2.f32 [{p}+{bytes}], {{{a}, {b}}};",
        p = in(_) u64::cast_from(address), a = in(_) f32::cast_from(first), b = in(_) f32::cast_from(second)
    );
}
