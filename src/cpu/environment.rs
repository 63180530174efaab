//! The floating-point environment of a thread: rounding mode, subnormal numbers and traps.

#[cfg(test)]
pub(crate) use register::STRANGE;
use register::{CONTROL, STANDARD, control_word, set_control_word};
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

/// MXCSR, the control and status register of SSE.
#[cfg(target_arch = "x86_64")]
mod register {
    /// MXCSR of a new process: exceptions masked, rounding to nearest, nothing flushed to zero.
    pub const STANDARD: u32 = 0x1f80;

    /// Bits of MXCSR that control arithmetic; the lowest six record exceptions.
    pub const CONTROL: u32 = 0xffc0;

    /// Control words that programs set. In this order they flush subnormal numbers to zero, round down, round
    /// up, truncate, and trap. The traps are for invalid operations, divisions by zero and overflow.
    #[cfg(test)]
    pub const STRANGE: [u32; 5] = [0x9fc0, 0x3f80, 0x5f80, 0x7f80, 0x1900];

    pub fn control_word() -> u32 {
        let mut word = 0u32;
        // SAFETY: the instruction writes the 4 bytes of `word` and nothing else.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
        }
        word
    }

    pub fn set_control_word(word: u32) {
        // SAFETY: `word` is `STANDARD` or was read from MXCSR, so no reserved bit is set. Without
        // `nomem` the compiler moves no memory access across the instruction.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags));
        }
    }
}

/// FPCR, the floating-point control register.
#[cfg(target_arch = "aarch64")]
mod register {
    /// FPCR of a new process: rounding to nearest, nothing flushed to zero, NaNs propagated, no traps.
    pub const STANDARD: u32 = 0;

    /// All bits of FPCR control arithmetic: exceptions are recorded in FPSR.
    pub const CONTROL: u32 = u32::MAX;

    /// Control words that programs set. In this order they flush subnormal numbers to zero, round down, round
    /// up, truncate, and replace NaNs by the default one. Traps are missing: most processors have none.
    #[cfg(test)]
    pub const STRANGE: [u32; 5] = [1 << 24, 2 << 22, 1 << 22, 3 << 22, 1 << 25];

    pub fn control_word() -> u32 {
        let word: u64;
        // SAFETY: the instruction reads a register that every process may read.
        unsafe {
            std::arch::asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags));
        }
        word as u32 // The upper half is reserved and zero.
    }

    pub fn set_control_word(word: u32) {
        // SAFETY: `word` is `STANDARD` or was read from FPCR, so no reserved bit is set. Without
        // `nomem` the compiler moves no memory access across the instruction.
        unsafe {
            std::arch::asm!("msr fpcr, {}", in(reg) u64::from(word), options(nostack, preserves_flags));
        }
    }
}

/// On other architectures the guard changes nothing.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub const STANDARD: u32 = 0;
    pub const CONTROL: u32 = 0;
    #[cfg(test)]
    pub const STRANGE: [u32; 5] = [STANDARD; 5];

    pub fn control_word() -> u32 {
        STANDARD
    }

    pub fn set_control_word(_: u32) {}
}

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

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
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
