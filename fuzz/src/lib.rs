//! What the fuzz targets share: an allocator that counts, so that a reader that takes more memory than its input is worth
//! is a finding, as a panic is.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Bytes in use, which may be freed on another thread than they were asked for.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    LIVE.set(LIVE.get() + bytes);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: everything is passed on to the system's allocator; the counters neither allocate nor have destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `read` and panics if it had more than `factor` times `bytes` in use at once, and `slack` for what does not depend
/// on them.
pub fn bounded<T>(bytes: usize, factor: usize, slack: usize, read: impl FnOnce() -> T) -> T {
    let before = LIVE.get();
    PEAK.set(before);
    let result = read();
    let used = (PEAK.get() - before).max(0) as usize;
    let allowed = factor * bytes + slack;
    assert!(
        used <= allowed,
        "{used} bytes in use for an input of {bytes}, allowed are {allowed}"
    );
    result
}
