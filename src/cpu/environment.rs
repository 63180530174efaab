//! The floating-point environment of a thread: rounding mode, subnormal numbers and traps.

use std::marker::PhantomData;

/// Guard that sets the default arithmetic of IEEE 754 for the current thread until it is dropped.
/// The default rounds to nearest, keeps subnormal numbers and disables traps. Threads that this
/// thread starts inherit the default.
///
/// Results are specified to the bit, and each rank computes its own. A library linked with
/// `-ffast-math`, or `torch.set_flush_denormal(True)`, makes a thread read subnormal numbers as 0.
/// Without the guard the results of such a thread would differ from those of other ranks.
#[derive(Debug)]
#[must_use = "dropping it restores the caller's environment"]
pub struct FloatEnvironment {
    /// Control word to restore; `None` if the guard did not change it.
    found: Option<u32>,
    /// Keeps the guard on its thread: the control word is a register of the thread.
    _thread: PhantomData<*const ()>,
}

/// MXCSR of a new process: exceptions masked, rounding to nearest, nothing flushed to zero.
const STANDARD: u32 = 0x1f80;

/// Bits of MXCSR that control arithmetic; the lowest six record exceptions.
const CONTROL: u32 = 0xffc0;

impl FloatEnvironment {
    /// Sets the environment of the current thread.
    pub fn standard() -> FloatEnvironment {
        let found = control_word();
        let differs = found & CONTROL != STANDARD;
        if differs {
            set_control_word(STANDARD);
        }
        FloatEnvironment {
            found: differs.then_some(found),
            _thread: PhantomData,
        }
    }
}

impl Drop for FloatEnvironment {
    fn drop(&mut self) {
        if let Some(found) = self.found {
            set_control_word(found);
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn control_word() -> u32 {
    let mut word = 0u32;
    // SAFETY: the instruction writes the 4 bytes of `word` and nothing else.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
    }
    word
}

#[cfg(target_arch = "x86_64")]
fn set_control_word(word: u32) {
    // SAFETY: `word` is `STANDARD` or was read from MXCSR, so no reserved bit is set. Without
    // `nomem` the compiler moves no memory access across the instruction.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags));
    }
}

/// On other architectures the guard changes nothing.
#[cfg(not(target_arch = "x86_64"))]
fn control_word() -> u32 {
    STANDARD
}

#[cfg(not(target_arch = "x86_64"))]
fn set_control_word(_: u32) {}

/// Control words that programs set. In this order they flush subnormal numbers to zero, round down, round up,
/// truncate, and trap. The traps are for invalid operations, divisions by zero and overflow.
#[cfg(test)]
pub(crate) const STRANGE: [u32; 5] = [0x9fc0, 0x3f80, 0x5f80, 0x7f80, 0x1900];

/// Runs `body` with this control word, and checks that `body` leaves the word unchanged.
#[cfg(test)]
pub(crate) fn under<T>(word: u32, body: impl FnOnce() -> T) -> T {
    let before = control_word();
    set_control_word(word);
    let result = body();
    let after = control_word();
    set_control_word(before);
    assert_eq!(after & CONTROL, word & CONTROL, "the environment stayed");
    result
}

/// Returns whether the thread has the standard environment.
#[cfg(test)]
pub(crate) fn is_standard() -> bool {
    control_word() & CONTROL == STANDARD
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    /// Returns half of the smallest normal number, which is 0 if subnormal results are flushed to
    /// zero.
    fn half_of_the_smallest() -> f32 {
        black_box(f32::MIN_POSITIVE) * black_box(0.5)
    }

    #[test]
    fn guard_sets_the_standard_environment_and_restores_the_callers() {
        for word in STRANGE {
            under(word, || {
                for _ in 0..2 {
                    let outer = FloatEnvironment::standard();
                    let inner = FloatEnvironment::standard();
                    assert!(is_standard());
                    assert!(half_of_the_smallest() > 0.0);
                    let there = std::thread::spawn(half_of_the_smallest);
                    assert!(there.join().unwrap() > 0.0);
                    drop(inner);
                    assert!(is_standard(), "the inner guard has nothing to restore");
                    drop(outer);
                    assert!(!is_standard());
                }
            });
        }
        // A thread inherits the environment of the thread that starts it.
        let there = under(STRANGE[0], || std::thread::spawn(is_standard));
        assert!(!there.join().unwrap());
    }
}
