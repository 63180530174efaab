//! An allocator that counts the bytes of each thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed, and their largest number.
    static LIVE: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, with counts.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn count(bytes: isize) {
    // A thread that ends has no counts any more.
    let _ = LIVE.try_with(|live| {
        let (now, peak) = live.get();
        live.set((now + bytes, peak.max(now + bytes)));
    });
}

// SAFETY: all calls are passed on to the system's allocator, with the arguments of the caller.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old bytes live until the new ones hold the contents.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(place, layout) }
    }
}

/// Runs `work`. Returns its value, and the most bytes that this thread held meanwhile beyond those that it held
/// before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, isize) {
    let before = LIVE.with(|live| {
        let (now, _) = live.get();
        live.set((now, now));
        now
    });
    let value = work();
    (value, LIVE.with(Cell::get).1 - before)
}
