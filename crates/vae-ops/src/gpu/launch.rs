//! What the launchers of the kernels share.

use cubecl::{prelude::*, server::Handle};

/// A contiguous `[batch, rows, channels]` of an activation on the device.
#[derive(Clone)]
pub(super) struct Rows {
    pub handle: Handle,
    pub dtype: ElemType,
    pub batch: usize,
    pub rows: usize,
    pub channels: usize,
}

impl Rows {
    /// Elements in all.
    pub fn len(&self) -> usize {
        self.batch * self.rows * self.channels
    }

    /// Addresses of 32 bits where they reach every element.
    pub fn address_type(&self) -> AddressType {
        AddressType::from_len(self.len())
    }
}

/// A buffer of `length` elements, vectors count as one.
///
/// # Safety
/// The handle must hold that many.
pub(super) unsafe fn buffer(handle: &Handle, length: usize) -> BufferArg {
    // Safety: the caller's.
    unsafe { BufferArg::from_raw_parts(handle.clone(), length) }
}

/// Elements of one load: the most that the device loads at once and that divide `granularity`.
pub(super) fn vector_size(client: &Client, dtype: ElemType, granularity: usize) -> usize {
    let widest = (16 / dtype.size()).min(client.properties().hardware.max_vector_size);
    [8, 4, 2]
        .into_iter()
        .find(|&size| size <= widest && granularity.is_multiple_of(size))
        .unwrap_or(1)
}
