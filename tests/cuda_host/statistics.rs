//! Runs the kernels for the statistics of whole arrays on the host, and compares them with a loop over the elements.

use super::library::{Library, starts};
use crate::support::{self, Rng};
use cinch::CallStatistics;
use cinch::gpu::abi::{PREMULTIPLY, StatisticsArgs, StatisticsSums};
use cinch::testing::{random_word, set_value, value};
use cinch::types::{DType, Scalar};
use std::ffi::{CString, c_char, c_void};

/// The type of `test_statistics` in `statistics.cpp`.
type Launch = unsafe extern "C" fn(*const c_char, u32, *const StatisticsArgs) -> bool;

/// Number beyond which elements saturate.
const LARGEST: f32 = 6e4;

/// Returns elements of which some are huge, tiny or not finite.
fn elements(dtype: DType, count: usize, rng: &mut Rng) -> Vec<u8> {
    const RARE: [f64; 9] = [
        0.0,
        1e-170,
        1e160,
        1e30,
        -1e-30,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -7e4,
    ];
    let mut all = vec![0; count * dtype.size()];
    for element in all.chunks_exact_mut(dtype.size()) {
        let x = match rng.below(40) {
            0 => rng.pick(&RARE),
            _ => (random_word(rng.next(), 0) >> 40) as f64 / f64::from(1 << 24) - 0.5,
        };
        set_value(dtype, x, element);
    }
    all
}

#[test]
fn statistics_kernels_equal_a_loop_over_the_elements() {
    if !starts("g++") {
        println!("skipped: no g++ is here to compile the kernels");
        return;
    }
    let options = ["-O0", "-Wno-unknown-pragmas", "-Wno-unused-function"];
    let library = Library::compile("g++", "statistics", &options, &["tests/cuda_host/host"]);
    // SAFETY: `statistics.cpp` defines `test_statistics` with the parameters of `Launch`.
    let launch: Launch =
        unsafe { std::mem::transmute::<*mut c_void, Launch>(library.find("test_statistics")) };
    let mut rng = Rng(support::seed());
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        for (count, shift) in [(0, 0), (1, 0), (700, 1), (5000, 0), (9001, 1)] {
            let factor = rng.pick(&[None, Some(0.5), Some(-3.0)]);
            let input = elements(dtype, count + shift, &mut rng);
            let output = elements(dtype, count / 50 + shift, &mut rng);
            let [input, output] = [&input, &output].map(|all| &all[shift * dtype.size()..]);
            let found = run(launch, dtype, (input, factor), output, &mut rng);
            let expected = expected(dtype, (input, factor), output);
            let near = |a: f64, b: f64| a == b || (a - b).abs() <= 1e-5 * b;
            let same = near(found.abs_max, expected.abs_max)
                && near(found.sum_squares, expected.sum_squares)
                && CallStatistics {
                    abs_max: expected.abs_max,
                    sum_squares: expected.sum_squares,
                    ..found
                } == expected;
            assert!(
                same,
                "{count} {dtype} times {factor:?}: {found:?}, not {expected:?}"
            );
        }
    }
}

/// Runs the kernel for an input, then the kernel for an output.
fn run(
    launch: Launch,
    dtype: DType,
    (input, factor): (&[u8], Option<f64>),
    output: &[u8],
    rng: &mut Rng,
) -> CallStatistics {
    let mut sums = StatisticsSums::default();
    let mut result = CallStatistics {
        saturated: 77,
        unused: [7; 5],
        ..CallStatistics::default()
    };
    let word = factor.map(|factor| cinch::reduce::factor_word(dtype, Scalar::Float(factor)));
    let args = |elements: &[u8], sums: &mut StatisticsSums, result: u64| StatisticsArgs {
        elements: elements.as_ptr().expose_provenance() as u64,
        count: (elements.len() / dtype.size()) as u64,
        sums: std::ptr::from_mut(sums).expose_provenance() as u64,
        result,
        factor: word.as_ref().map_or(0, |word| *word.as_ref().unwrap()),
        flags: factor.map_or(0, |_| PREMULTIPLY.into()),
        largest: LARGEST.to_bits(),
        has_input: 1,
        unused: 0,
    };
    let name = CString::new(dtype.to_string()).unwrap();
    let place = std::ptr::from_mut(&mut result).expose_provenance() as u64;
    for args in [args(input, &mut sums, 0), args(output, &mut sums, place)] {
        // SAFETY: the arguments name memory that outlives the call.
        assert!(unsafe { launch(name.as_ptr(), 1 + rng.below(3) as u32, &args) });
    }
    assert_eq!(sums, StatisticsSums::default(), "{dtype}: sums are left");
    result
}

/// Returns the statistics by a loop over the elements.
fn expected(dtype: DType, (input, factor): (&[u8], Option<f64>), output: &[u8]) -> CallStatistics {
    let values = |all: &[u8]| -> Vec<f64> {
        let elements = all.chunks_exact(dtype.size());
        elements.map(|element| value(dtype, element)).collect()
    };
    let mut expected = CallStatistics {
        known: CallStatistics::NON_FINITE,
        has_input: 1,
        ..CallStatistics::default()
    };
    for x in values(input) {
        let factor = factor.unwrap_or(1.0);
        let x = match dtype {
            DType::F64 => x * factor,
            // Kernels multiply in fp32.
            _ => f64::from(x as f32 * factor as f32),
        };
        match x.is_finite() {
            true => {
                expected.abs_max = expected.abs_max.max(x.abs());
                expected.sum_squares += x * x;
                expected.saturated += u64::from(x.abs() > f64::from(LARGEST));
            }
            false => expected.non_finite += 1,
        }
    }
    if values(output).iter().any(|x| !x.is_finite()) {
        expected.verdict = CallStatistics::NON_FINITE;
    }
    expected
}
