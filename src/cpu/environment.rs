//! The floating-point environment of a thread.

use std::marker::PhantomData;

/// While it lives, the thread computes as IEEE 754 does by default, whatever it was set to before:
/// rounding to nearest, subnormal numbers as they are, exceptions without a trap. Threads that it
/// starts meanwhile inherit that.
///
/// Results are specified to the bit, and each rank forms its own. A thread on which a library
/// linked with `-ffast-math` was loaded, or `torch.set_flush_denormal(True)` called, takes
/// subnormal numbers for 0: its results would differ from those of the other ranks.
#[derive(Debug)]
#[must_use = "dropping it brings the caller's environment back"]
pub struct FloatEnvironment {
    /// What to set again, if it had to be changed.
    found: Option<u32>,
    /// It is the thread's that made it.
    _thread: PhantomData<*const ()>,
}

/// MXCSR of a new process: all exceptions masked, to nearest, nothing flushed to zero.
const STANDARD: u32 = 0x1f80;

/// Bits of MXCSR that say how to compute. The lowest six say what happened so far.
const CONTROL: u32 = 0xffc0;

impl FloatEnvironment {
    /// Sets the thread's environment.
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
    // SAFETY: stores the 4 bytes of MXCSR to `word`.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
    }
    word
}

#[cfg(target_arch = "x86_64")]
fn set_control_word(word: u32) {
    // SAFETY: `word` is `STANDARD` or was read from MXCSR, so that no reserved bit is set. Not
    // `nomem`, so that what goes to or comes from memory stays on its side.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags));
    }
}

/// Other machines run in the environment that they have.
#[cfg(not(target_arch = "x86_64"))]
fn control_word() -> u32 {
    STANDARD
}

#[cfg(not(target_arch = "x86_64"))]
fn set_control_word(_: u32) {}

/// Environments that programs have: flushing subnormal numbers in results and operands, the other
/// roundings, and traps for invalid operations, divisions by zero and overflow.
#[cfg(test)]
pub(crate) const STRANGE: [u32; 5] = [0x9fc0, 0x3f80, 0x5f80, 0x7f80, 0x1900];

/// Runs `body` in an environment such as a program may have, which it must leave as it was.
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

/// Whether the thread computes as it should.
#[cfg(test)]
pub(crate) fn is_standard() -> bool {
    control_word() & CONTROL == STANDARD
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    /// The smallest normal number, halved: 0 where results are flushed.
    fn half_of_the_smallest() -> f32 {
        black_box(f32::MIN_POSITIVE) * black_box(0.5)
    }

    #[test]
    fn arithmetic_is_the_standard_one_and_the_callers_comes_back() {
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
                    assert!(is_standard(), "the inner one found nothing to change");
                    drop(outer);
                    assert!(!is_standard());
                }
            });
        }
        // Threads inherit the environment of the one that starts them.
        let there = under(STRANGE[0], || std::thread::spawn(is_standard));
        assert!(!there.join().unwrap());
    }
}
