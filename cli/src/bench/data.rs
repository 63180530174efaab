//! Input of a benchmark: generated, or arrays from files.
//!
//! Element i of a rank's input is a pure function of (seed, rank, set, i), where a set is one of
//! the buffers in rotation. Every rank can therefore compute the other ranks' inputs and check its
//! output without communication.

use crate::npy::Array;
use cinch::testing::{gaussian, largest, random_word, set_integer, set_value, value};
use cinch::{DType, ReduceOp};
use clap::ValueEnum;
use std::path::{Path, PathBuf};

/// Distribution of generated floating-point input. No distribution yields zeros, because zeros
/// compress unusually well and cost unusually little power.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Distribution {
    /// N(0,1).
    Gaussian,
    /// N(0,1) times exp(1.5 N(0,1)): most magnitudes are small, and a few are very large.
    Heavy,
    /// U(-1,1).
    Uniform,
}

/// Number of quantiles of the normal distribution in the table; 16 random bits select one.
const TABLE: usize = 1 << 16;

/// Input of all ranks.
pub struct InputSource {
    seed: u64,
    nranks: usize,
    distribution: Distribution,
    normal: Vec<f32>,
    spread: Vec<f32>,
    files: Vec<Array>,
    /// Number of elements after which the input repeats; 0 if it never does.
    period: usize,
}

/// Input of one rank in one buffer set.
pub struct RankInput<'a> {
    source: &'a InputSource,
    dtype: DType,
    op: Option<ReduceOp>,
    key: u64,
    file: Option<(&'a Array, usize)>,
}

impl InputSource {
    /// Generates input for `nranks` ranks.
    pub fn generated(seed: u64, distribution: Distribution, nranks: usize) -> InputSource {
        // Each table entry is the quantile of the middle one of all words that begin with the
        // entry's 16 bits.
        let normal: Vec<f32> = (0..TABLE)
            .map(|bits| gaussian(((bits as u64) << 48) + (1 << 47)) as f32)
            .collect();
        let spread = normal.iter().map(|&x| (1.5 * x).exp()).collect();
        InputSource {
            seed,
            nranks,
            distribution,
            normal,
            spread,
            files: Vec::new(),
            period: 0,
        }
    }

    /// Makes the input repeat after `period` elements. Memory filled with copies of one period can
    /// then be checked at any offset.
    pub fn repeating(self, period: usize) -> InputSource {
        InputSource { period, ..self }
    }

    /// Reads .npy arrays: one for all ranks, or one for each rank.
    ///
    /// # Errors
    /// Returns an error message if the files do not fit the ranks or cannot be read.
    pub fn from_files(paths: &[PathBuf], nranks: usize) -> Result<InputSource, String> {
        let files = rank_files(paths, nranks)?;
        let arrays = files
            .iter()
            .map(|path| Array::read(path))
            .collect::<Result<Vec<_>, _>>()?;
        for (array, path) in arrays.iter().zip(&files) {
            if array.bytes.is_empty() {
                return Err(format!("{}: holds no elements", path.display()));
            }
            if array.dtype != arrays[0].dtype {
                return Err(format!(
                    "{} holds {}, but {} holds {}; all ranks need one type",
                    path.display(),
                    array.dtype,
                    files[0].display(),
                    arrays[0].dtype
                ));
            }
        }
        let mut source = InputSource::generated(0, Distribution::Gaussian, nranks);
        source.files = arrays;
        Ok(source)
    }

    /// Returns the element type of the files, and the bytes of the shortest file; `None` for
    /// generated input.
    pub fn native(&self) -> Option<(DType, usize)> {
        let bytes = self.files.iter().map(|array| array.bytes.len()).min()?;
        Some((self.files[0].dtype, bytes))
    }

    /// Checks that the input can be converted to this type.
    ///
    /// # Errors
    /// Returns an error message if the files hold another type and a conversion from or to integers
    /// would be needed.
    pub fn admits(&self, dtype: DType) -> Result<(), String> {
        match self.native() {
            Some((native, _)) if native != dtype && !(native.is_float() && dtype.is_float()) => {
                Err(format!(
                    "the data files hold {native}, but -d is {dtype}; only floats are converted"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the input of `rank` in buffer set `set`. `op` limits the values, for example to
    /// magnitudes near 1 for products.
    pub fn stream(
        &self,
        dtype: DType,
        op: Option<ReduceOp>,
        rank: usize,
        set: usize,
    ) -> RankInput<'_> {
        // Each buffer set begins at another offset in the file, so that sets differ.
        let file = match self.files.len() {
            0 => None,
            n => {
                let array = &self.files[rank.min(n - 1)];
                let length = array.bytes.len() / array.dtype.size();
                Some((array, set.wrapping_mul(4099) % length))
            }
        };
        RankInput {
            source: self,
            dtype,
            op,
            key: mix(self.seed ^ mix((rank as u64) << 32 | set as u64)).wrapping_sub(STEP),
            file,
        }
    }
}

impl RankInput<'_> {
    /// Writes the input's elements from index `start` on into `bytes`.
    pub fn fill(&self, start: usize, bytes: &mut [u8]) {
        let size = self.dtype.size();
        let (mut at, mut rest) = (start, bytes);
        while self.source.period > 0 && !rest.is_empty() {
            let from = at % self.source.period;
            let run = (self.source.period - from).min(rest.len().div_ceil(size));
            let (now, later) = rest.split_at_mut((run * size).min(rest.len()));
            self.fill_once(from, now);
            (at, rest) = (at + run, later);
        }
        if self.source.period == 0 {
            self.fill_once(start, rest);
        }
    }

    fn fill_once(&self, start: usize, bytes: &mut [u8]) {
        let size = self.dtype.size();
        if let Some((array, shift)) = self.file {
            let length = array.bytes.len() / array.dtype.size();
            let from = array.dtype.size();
            for (i, element) in bytes.chunks_exact_mut(size).enumerate() {
                let at = (start + shift + i) % length * from;
                let held = &array.bytes[at..at + from];
                if array.dtype == self.dtype {
                    element.copy_from_slice(held);
                } else {
                    set_value(self.dtype, value(array.dtype, held), element);
                }
            }
        } else if self.dtype == DType::F32 {
            for (i, element) in bytes.chunks_exact_mut(4).enumerate() {
                let drawn = self.draw((start + i) as u64);
                element.copy_from_slice(&drawn.to_le_bytes());
            }
        } else if self.dtype.is_float() {
            // This limit on magnitudes keeps the sum over all ranks finite.
            let limit = largest(self.dtype) / (2 * self.source.nranks) as f64;
            for (i, element) in bytes.chunks_exact_mut(size).enumerate() {
                let drawn = f64::from(self.draw((start + i) as u64));
                set_value(self.dtype, drawn.clamp(-limit, limit), element);
            }
        } else {
            for (i, element) in bytes.chunks_exact_mut(size).enumerate() {
                set_integer(self.integer((start + i) as u64), element);
            }
        }
    }

    fn bits(&self, index: u64) -> u64 {
        random_word(self.key, index)
    }

    fn draw(&self, index: u64) -> f32 {
        let bits = self.bits(index);
        let uniform = ((bits >> 40) as f32 + 0.5) * 2f32.powi(-23) - 1.0;
        if let Some(ReduceOp::Prod) = self.op {
            // Magnitudes near 1 keep products over many ranks from underflow and overflow.
            let magnitude = (0.25 * uniform).exp2();
            return if bits & 1 == 1 { -magnitude } else { magnitude };
        }
        let first = (bits >> 48) as usize;
        match self.source.distribution {
            Distribution::Gaussian => self.source.normal[first],
            Distribution::Heavy => {
                self.source.normal[first] * self.source.spread[(bits >> 32) as usize % TABLE]
            }
            Distribution::Uniform => uniform,
        }
    }

    fn integer(&self, index: u64) -> i128 {
        let bits = self.bits(index);
        match self.op {
            // An average is computed from a sum, so this limit keeps the sum within the range of
            // the type.
            Some(ReduceOp::Avg) => {
                let span = largest(self.dtype) as i128 / self.source.nranks as i128;
                i128::from(bits) % (span + 1)
            }
            _ => i128::from(bits),
        }
    }
}

/// Returns the files of ranks 0, 1, ..., or a single file for all ranks.
fn rank_files(paths: &[PathBuf], nranks: usize) -> Result<Vec<PathBuf>, String> {
    let files = match paths {
        [one] if one.is_dir() => {
            let mut files: Vec<PathBuf> = std::fs::read_dir(one)
                .map_err(|error| format!("{}: {error}", one.display()))?
                .filter_map(|entry| entry.ok().map(|entry| entry.path()))
                .filter(|path| path.extension().is_some_and(|extension| extension == "npy"))
                .collect();
            // Names are sorted by length first, so that x10 comes after x9.
            files.sort_by_key(|path| (path.as_os_str().len(), path.clone()));
            if files.is_empty() {
                return Err(format!("{}: holds no .npy file", one.display()));
            }
            files
        }
        [one] if one.to_string_lossy().contains("{rank}") => {
            (0..nranks).map(|rank| numbered(one, rank)).collect()
        }
        _ => paths.to_vec(),
    };
    match files.len() {
        1 => Ok(files),
        held if held == nranks => Ok(files),
        held => Err(format!(
            "--data names {held} files for {nranks} ranks; give one for each rank, or one for all"
        )),
    }
}

fn numbered(path: &Path, rank: usize) -> PathBuf {
    path.to_string_lossy()
        .replace("{rank}", &rank.to_string())
        .into()
}

/// Increment of the counter in SplitMix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes the bits of a word with the finaliser of SplitMix64.
fn mix(word: u64) -> u64 {
    random_word(word.wrapping_sub(STEP), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(source: &InputSource, rank: usize, set: usize, count: usize) -> Vec<f64> {
        let mut bytes = vec![0; 4 * count];
        let stream = source.stream(DType::F32, Some(ReduceOp::Sum), rank, set);
        stream.fill(0, &mut bytes);
        bytes.chunks(4).map(|x| value(DType::F32, x)).collect()
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let count = 400_000;
        for (distribution, variance) in [
            (Distribution::Gaussian, 1.0),
            (Distribution::Uniform, 1.0 / 3.0),
        ] {
            let data = values(&InputSource::generated(3, distribution, 4), 1, 0, count);
            let mean = data.iter().sum::<f64>() / count as f64;
            let square = data.iter().map(|x| x * x).sum::<f64>() / count as f64;
            assert!(mean.abs() < 0.01, "{distribution:?}: mean {mean}");
            assert!(
                (square / variance - 1.0).abs() < 0.02,
                "{distribution:?}: {square}"
            );
        }
        // The mean magnitude of n1 exp(1.5 n2) for normal n1 and n2 is sqrt(2/pi) exp(9/8).
        let data = values(
            &InputSource::generated(3, Distribution::Heavy, 4),
            1,
            0,
            count,
        );
        let mean = data.iter().map(|x| x.abs()).sum::<f64>() / count as f64;
        let expected = (2.0 / std::f64::consts::PI).sqrt() * 1.125f64.exp();
        assert!(
            (mean / expected - 1.0).abs() < 0.05,
            "{mean} for {expected}"
        );
    }

    #[test]
    fn streams_are_random_access_and_independent() {
        let source = InputSource::generated(1, Distribution::Gaussian, 4);
        for dtype in DType::ALL {
            let stream = source.stream(dtype, Some(ReduceOp::Sum), 2, 1);
            let mut whole = vec![0; 1000 * dtype.size()];
            stream.fill(0, &mut whole);
            let mut part = vec![0; 100 * dtype.size()];
            stream.fill(333, &mut part);
            assert_eq!(
                part,
                whole[333 * dtype.size()..433 * dtype.size()],
                "{dtype}"
            );
            assert!(whole.iter().any(|&byte| byte != 0));
        }
        let base = values(&source, 0, 0, 1000);
        assert_ne!(base, values(&source, 1, 0, 1000));
        assert_ne!(base, values(&source, 0, 1, 1000));
        let other = InputSource::generated(2, Distribution::Gaussian, 4);
        assert_ne!(base, values(&other, 0, 0, 1000));
    }

    #[test]
    fn the_shipped_gradients_are_one_shard_a_rank() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/data");
        let source = InputSource::from_files(std::slice::from_ref(&folder), 4).unwrap();
        let (dtype, bytes) = source.native().unwrap();
        assert_eq!(dtype, DType::F32);
        assert!(bytes > 400_000, "{bytes}");
        let shard = |rank| values(&source, rank, 0, bytes / 4);
        assert_ne!(shard(0), shard(3));
        assert!(shard(2).iter().all(|x| x.is_finite()));
        let zeros = shard(1).iter().filter(|x| **x == 0.0).count();
        assert!(zeros * 4 < bytes / 4, "{zeros} zeros");
        for nranks in [1, 3, 5] {
            let error = InputSource::from_files(std::slice::from_ref(&folder), nranks)
                .err()
                .unwrap();
            let words = format!("4 files for {nranks} ranks");
            assert!(error.contains(&words), "{error}");
        }
        let named = InputSource::from_files(&[folder.join("gradients-rank{rank}.npy")], 3).unwrap();
        assert_eq!(values(&named, 2, 0, 99), values(&source, 2, 0, 99));
        let one = InputSource::from_files(&[folder.join("gradients-rank1.npy")], 9).unwrap();
        assert_eq!(values(&one, 8, 0, 99), values(&source, 1, 0, 99));
        assert!(one.admits(DType::BF16).is_ok());
        assert!(one.admits(DType::I32).is_err());
    }

    #[test]
    fn files_of_a_folder_go_by_their_numbers() {
        let name = format!("cinch-data-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let named = |rank: usize| folder.join(format!("x{rank}.npy"));
        // Files are created in descending order; sorting by letters would put 10 before 2.
        for rank in (0..12).rev() {
            std::fs::write(named(rank), "").unwrap();
        }
        std::fs::write(folder.join("README"), "").unwrap();
        let found = rank_files(std::slice::from_ref(&folder), 12);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), (0..12).map(named).collect::<Vec<_>>());
    }
}
