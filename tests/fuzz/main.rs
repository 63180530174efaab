//! Replays the corpus of each fuzz target, and seeded changes of it, on a stable toolchain.
//!
//! `CINCH_TEST_MUTATIONS` is the number of changed inputs of each target, and `CINCH_TEST_SEED` their seed.

#[allow(unsafe_code)]
mod counting_allocator;
mod mutate;
// Programs of libFuzzer call `run`. Bodies call the C ABI and make FIFOs.
#[allow(dead_code, unsafe_code)]
#[path = "../../fuzz/src/lib.rs"]
mod targets;

use cinch::testing::Random;
use std::fs;
use std::path::{Path, PathBuf};
use targets::TARGETS;

/// Most memory that an input may take, in bytes.
const MOST_BYTES: isize = 256 << 20;

/// Largest size of all seeds together, in bytes.
const MOST_CORPUS_BYTES: usize = 200 << 10;

/// Largest input that changes produce, in bytes.
const LONGEST: usize = 16 << 10;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

/// Returns the inputs in the folder of a target, sorted by name.
fn seeds(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = corpus().join(name);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read(path).unwrap())
    };
    files.into_iter().map(read).collect()
}

fn number(variable: &str, default: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(default, |text| text.parse().expect(variable))
}

/// Runs an input. On a panic prints it, so that it can become a seed.
fn run(body: fn(&[u8]) -> Option<bool>, what: &str, input: &[u8]) -> Option<bool> {
    struct OnPanic<'a>(&'a str, &'a [u8]);
    impl Drop for OnPanic<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                println!("{}: {:?}", self.0, self.1.escape_ascii().to_string());
            }
        }
    }
    let _shown = OnPanic(what, input);
    let (outcome, peak) = counting_allocator::peak_of(|| body(input));
    assert!(peak <= MOST_BYTES, "{what} took {peak} bytes of memory");
    outcome
}

/// Replays the seeds of a target and changes of them.
fn replay(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let seeds = seeds(name);
    let (mut accepted, mut refused) = (0, 0);
    for (file, input) in &seeds {
        let what = format!("fuzz/corpus/{name}/{file}");
        let outcome = run(target.body, &what, input);
        assert!(outcome != Some(true), "{what} reaches the planted defect");
        // The name of a seed promises its outcome. A change of a format must bring new seeds.
        let is_bad = file.starts_with("bad-");
        assert_eq!(outcome.is_none(), is_bad, "{what}: {outcome:?}");
        *(if is_bad { &mut refused } else { &mut accepted }) += 1;
    }
    assert!(
        accepted > 0 && refused > 0,
        "{name}: {accepted} good and {refused} bad seeds"
    );
    let (count, seed) = (
        number("CINCH_TEST_MUTATIONS", 2000),
        number("CINCH_TEST_SEED", 29),
    );
    println!(
        "{name}: {} seeds, {count} changed inputs of seed {seed}",
        seeds.len()
    );
    let mut random = Random::new(seed);
    let (inputs, mut parsed) = (
        seeds
            .iter()
            .map(|(_, input)| &input[..])
            .collect::<Vec<_>>(),
        0,
    );
    for case in 0..count {
        let input = mutate::mutated(&inputs, LONGEST, &mut random);
        let what = format!("{name}, changed input {case} of seed {seed}");
        parsed += u64::from(run(target.body, &what, &input).is_some());
    }
    println!("{name}: {parsed} of {count} changed inputs were accepted");
}

/// Makes a test for each of the targets.
macro_rules! replays {
    ($($name:ident)*) => {
        const REPLAYED: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                replay(stringify!($name));
            }
        )*
    };
}

replays! {
    id handshake framed_stream members pump slots codec_decode tuning_table topology environment npy residuals c_calls
}

#[test]
fn every_target_has_a_program_a_corpus_and_a_replay() {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, REPLAYED);
    let manifest = include_str!("../../fuzz/Cargo.toml");
    for name in names {
        let path = format!("fuzz_targets/{name}.rs");
        assert!(manifest.contains(&path), "fuzz/Cargo.toml has no {path}");
        let program = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz")
            .join(path);
        let program = fs::read_to_string(program).unwrap();
        assert!(program.contains(&format!("run(\"{name}\"")), "{program}");
    }
}

#[test]
fn corpus_is_small() {
    let all = TARGETS.iter().flat_map(|target| seeds(target.name));
    let bytes: usize = all.map(|(_, input)| input.len()).sum();
    println!("the corpus has {bytes} bytes");
    assert!(bytes <= MOST_CORPUS_BYTES);
}

#[test]
fn planted_allocation_is_counted() {
    fn body(_: &[u8]) -> Option<bool> {
        std::hint::black_box(vec![0_u8; (MOST_BYTES + 1) as usize]);
        None
    }
    let caught = std::panic::catch_unwind(|| run(body, "planted", &[]));
    assert!(caught.is_err(), "256 MiB and a byte were allowed");
}
