//! Cores.

/// A set of cores, one bit each, by the system's numbers.
pub type CoreSet = [u64; 16];

/// The cores that the calling thread may run on; the lowest ones, as many as there are, if the
/// system does not say.
pub fn allowed() -> CoreSet {
    let mut cores = CoreSet::default();
    // SAFETY: the set is plain data of the size that is passed; the kernel fills as much of it
    // as it has cores.
    let filled = unsafe {
        libc::sched_getaffinity(
            0,
            size_of::<CoreSet>(),
            cores.as_mut_ptr().cast::<libc::cpu_set_t>(),
        )
    };
    if filled != 0 || cores == CoreSet::default() {
        // More cores than the set holds.
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        for core in 0..count.min(cores.len() * 64) {
            cores[core / 64] |= 1 << (core % 64);
        }
    }
    cores
}

/// How many cores are in the set.
pub fn count(cores: &CoreSet) -> usize {
    cores.iter().map(|word| word.count_ones() as usize).sum()
}

/// Binds the calling thread, and processes that it starts, to one core.
///
/// # Errors
/// System if the core is not there or not allowed.
pub fn bind(core: usize) -> std::io::Result<()> {
    let mut cores = CoreSet::default();
    let word = cores
        .get_mut(core / 64)
        .ok_or(std::io::ErrorKind::InvalidInput)?;
    *word |= 1 << (core % 64);
    // SAFETY: as in `allowed`; the kernel reads the set.
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
    fn a_bound_thread_has_one_core() {
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
