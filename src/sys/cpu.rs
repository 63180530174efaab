//! CPU cores, by the numbers that the kernel gives them.

/// A set of cores: bit n is set if core n belongs to it.
pub type CoreSet = [u64; 16];

/// Returns the cores that the calling thread may run on. If the kernel does not report them,
/// returns as many cores from 0 as this process may use.
pub fn allowed() -> CoreSet {
    let mut cores = CoreSet::default();
    // SAFETY: the set is plain data of the size that is passed; the kernel writes at most that
    // much.
    let filled = unsafe {
        libc::sched_getaffinity(
            0,
            size_of::<CoreSet>(),
            cores.as_mut_ptr().cast::<libc::cpu_set_t>(),
        )
    };
    if filled != 0 || cores == CoreSet::default() {
        // The kernel refuses a set that is smaller than its own.
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        for core in 0..count.min(cores.len() * 64) {
            cores[core / 64] |= 1 << (core % 64);
        }
    }
    cores
}

/// Returns the number of cores in the set.
pub fn count(cores: &CoreSet) -> usize {
    cores.iter().map(|word| word.count_ones() as usize).sum()
}

/// Binds the calling thread, and processes that it starts, to `core`.
///
/// # Errors
/// System if the core does not exist or is not allowed.
pub fn bind(core: usize) -> std::io::Result<()> {
    let mut cores = CoreSet::default();
    let word = cores
        .get_mut(core / 64)
        .ok_or(std::io::ErrorKind::InvalidInput)?;
    *word |= 1 << (core % 64);
    bind_to(&cores)
}

/// Binds the calling thread, and processes that it starts, to the cores of a set.
///
/// # Errors
/// System if none of the cores exists or is allowed.
pub fn bind_to(cores: &CoreSet) -> std::io::Result<()> {
    // SAFETY: the set is plain data of the size that is passed, and the kernel only reads it.
    let done = unsafe {
        libc::sched_setaffinity(
            0,
            size_of::<CoreSet>(),
            cores.as_ptr().cast::<libc::cpu_set_t>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_thread_has_one_core() {
        let all = allowed();
        assert!(count(&all) >= 1);
        let first = (0..1024)
            .find(|core| all[core / 64] >> (core % 64) & 1 == 1)
            .unwrap();
        let bound = std::thread::spawn(move || {
            bind(first).unwrap();
            allowed()
        });
        let bound = bound.join().unwrap();
        assert_eq!(count(&bound), 1);
        assert_eq!(bound[first / 64], 1 << (first % 64));
        assert!(bind(1023).is_err() || all[15] >> 63 == 1);
    }
}
