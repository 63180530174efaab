use super::point::Point;
use super::search::{Stopwatch, coarse, run};
use super::*;
use crate::bench::metrics::size_of;
use crate::bench::row::Row;
use crate::bench::world::threads::{self, Flaw};
use crate::testing::parsed;
use cinch::plan::KernelVariant;
use cinch::types::KernelProtocol;
use cinch::{Algorithm, DType};

const RANKS: usize = 4;

fn way(algorithm: Algorithm, kernel: KernelProtocol, channels: usize) -> KernelVariant {
    KernelVariant {
        algorithm,
        kernel,
        channels,
        chunk: 0,
    }
}

/// Returns kernel variants with a cost model that is unknown to the tuner: fixed microseconds,
/// GB/s, and largest size in bytes.
fn laws() -> Vec<(KernelVariant, f64, f64, usize)> {
    let mut laws = Vec::new();
    for (at, channels) in [8, 16, 32, 64].into_iter().enumerate() {
        let more = at as f64;
        let each = channels as f64;
        laws.extend([
            (
                way(Algorithm::OneShot, KernelProtocol::FUSED_LL, channels),
                3.0 + 0.1 * more,
                2.0 * each,
                512 << 10,
            ),
            (
                way(Algorithm::Direct, KernelProtocol::LL128, channels),
                6.0 + 0.1 * more,
                3.0 * each,
                8 << 20,
            ),
            (
                way(Algorithm::Direct, KernelProtocol::SIMPLE, channels),
                9.0 + 0.2 * more,
                5.0 * each,
                usize::MAX,
            ),
            (
                way(Algorithm::Ring, KernelProtocol::SIMPLE, channels),
                20.0 + 0.2 * more,
                6.0 * each,
                usize::MAX,
            ),
        ]);
    }
    laws
}

/// Simulated GPUs. Times follow [`laws`] with noise, and every measurement advances a simulated
/// clock.
struct Paper {
    /// A size, and the microseconds by which `simple` takes longer below this size.
    step: (usize, f64),
    noise: f64,
    state: u64,
    clock: f64,
    measured: usize,
    /// Size whose first measurements are disturbed, and the number of disturbed measurements.
    disturbed: (usize, usize),
}

impl Paper {
    fn new(noise: f64) -> Paper {
        Paper {
            step: (0, 0.0),
            noise,
            state: 7,
            clock: 0.0,
            measured: 0,
            disturbed: (0, 0),
        }
    }

    fn law(&self, row: &Row, way: &KernelVariant) -> Option<f64> {
        let size = size_of(row.collective, row.dtype, RANKS, row.count);
        let laws = laws();
        let law = laws.iter().find(|law| law.0 == *way && size <= law.3)?;
        // A codec sends a quarter of the bytes, after 4 us of encoding.
        let (fixed, share) = match row.codec.is_some_and(|codec| codec.is_lossy()) {
            true => (4.0, 0.25),
            false => (0.0, 1.0),
        };
        let step = match way.kernel == KernelProtocol::SIMPLE && size < self.step.0 {
            true => self.step.1,
            false => 0.0,
        };
        Some((law.1 + fixed + step) * 1e-6 + size as f64 * share / (law.2 * 1e9))
    }

    fn best(&self, row: &Row) -> f64 {
        let times = laws().into_iter().filter_map(|law| self.law(row, &law.0));
        times.fold(f64::INFINITY, f64::min)
    }
}

impl Stopwatch for Paper {
    fn variants(&mut self, row: &Row) -> Result<Vec<KernelVariant>> {
        let laws = laws().into_iter();
        Ok(laws
            .map(|law| law.0)
            .filter(|way| self.law(row, way).is_some())
            .collect())
    }

    fn supports(&mut self, row: &Row, way: &KernelVariant) -> Result<bool> {
        Ok(self.law(row, way).is_some())
    }

    fn time(&mut self, row: &Row, ways: &[KernelVariant], repetitions: usize) -> Result<Vec<f64>> {
        let size = size_of(row.collective, row.dtype, RANKS, row.count);
        let mut times = Vec::new();
        for way in ways {
            let law = self.law(row, way).expect("a way that can be taken");
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let unit = (self.state >> 40) as f64 / (1u64 << 24) as f64;
            let noise = 1.0 + self.noise * unit / (repetitions as f64).sqrt();
            times.push(law * noise);
            self.clock += 10e-3 + repetitions as f64 * 2e-3;
            self.measured += 1;
        }
        if self.disturbed.0 == size && self.disturbed.1 > 0 {
            self.disturbed.1 -= 1;
            times.iter_mut().for_each(|time| *time *= 40.0);
        }
        Ok(times)
    }

    fn elapsed(&mut self) -> Result<f64> {
        Ok(self.clock)
    }

    fn keep(&mut self, _: &Row, _: usize, times: &[(KernelVariant, f64)], _: usize) {
        assert!(!times.is_empty());
    }
}

fn sweep(collective: Collective, codec: &str) -> Sweep {
    Sweep {
        collective,
        dtype: DType::F32,
        codec: codec.parse().unwrap(),
    }
}

fn tune(paper: &mut Paper, sweeps: &[Sweep], seconds: f64) -> (TuningTable, Vec<String>) {
    let (searches, notes) = run(paper, sweeps, RANKS, (8, 1 << 30), seconds).unwrap();
    let entries: Vec<_> = searches
        .iter()
        .flat_map(|search| choose::entries(search.sweep(), search.points()))
        .collect();
    let header = TableHeader {
        gpu: "Paper".into(),
        ranks: RANKS,
        links: "NVLink".into(),
        date: "2026-01-01".into(),
        cinch: "0".into(),
        command: "cinch tune".into(),
    };
    (
        TuningTable::parse("paper", &header.write(&entries)).unwrap(),
        notes,
    )
}

/// Walks through all sizes and compares the chosen variant's time with the fastest one's. Returns
/// the largest ratio of both times, and the largest drop of the chosen time as the size grows.
fn judge(paper: &Paper, table: &TuningTable, sweep: &Sweep) -> (f64, f64) {
    let (mut worst, mut fall, mut before) = (1.0f64, 0.0f64, 0.0f64);
    let mut size = 8.0f64;
    while size <= (1 << 30) as f64 {
        let row = sweep.row(RANKS, size as usize);
        let bytes = size_of(row.collective, row.dtype, RANKS, row.count);
        size *= 1.1;
        if row.count == 0 {
            continue;
        }
        let choice = table.choice(sweep.collective, sweep.wire(), bytes).unwrap();
        let time = paper.law(&row, &choice.variant).unwrap_or_else(|| {
            panic!("{} at {bytes} cannot be", choice.variant);
        });
        worst = worst.max(time / paper.best(&row));
        fall = fall.max(1.0 - time / before.max(time));
        before = before.max(time);
    }
    (worst, fall)
}

#[test]
fn the_table_is_the_laws_without_knowing_them() {
    let sweeps = [
        sweep(Collective::AllReduce, "raw"),
        sweep(Collective::AllReduce, "linear8"),
        sweep(Collective::AllReduce, "dynamic8"),
        sweep(Collective::AllGather, "raw"),
        sweep(Collective::ReduceScatter, "raw"),
    ];
    // Only all_reduce is tuned: the table format refuses some variants of [`laws`] for other
    // collectives.
    let sweeps = &sweeps[..3];
    for noise in [0.0, 0.02] {
        let mut paper = Paper::new(noise);
        let (table, notes) = tune(&mut paper, sweeps, 80.0);
        assert_eq!(notes, Vec::<String>::new());
        assert!(paper.clock < 80.0, "{}", paper.clock);
        assert_eq!(table.cliffs(), Vec::<String>::new());
        for sweep in sweeps {
            let (worst, fall) = judge(&paper, &table, sweep);
            assert!(worst < 1.08, "noise {noise}: {worst} of the fastest");
            assert!(fall < 0.05, "noise {noise}: a fall by {fall}");
        }
    }
}

#[test]
fn a_budget_is_kept_and_what_is_missing_is_said() {
    let sweeps = [
        sweep(Collective::AllReduce, "raw"),
        sweep(Collective::AllReduce, "linear8"),
    ];
    let mut enough = Paper::new(0.0);
    tune(&mut enough, &sweeps, 1e9);
    for seconds in [0.5, 2.0, 5.0] {
        let mut paper = Paper::new(0.0);
        let (table, notes) = tune(&mut paper, &sweeps, seconds);
        // The last measurement may begin just before the limit; it covers only a few variants.
        assert!(paper.clock < seconds + 0.7, "{seconds}: {}", paper.clock);
        assert!(paper.measured < enough.measured);
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains("time was spent"));
        for sweep in &sweeps {
            // Even with little time the small sizes must have been measured and have entries.
            assert!(table.choice(sweep.collective, sweep.wire(), 64).is_some());
        }
    }
}

#[test]
fn a_disturbed_size_is_measured_again() {
    let mut paper = Paper::new(0.0);
    // Both measurements of the first visit to 32 KiB are disturbed; later ones are not.
    paper.disturbed = (32 << 10, 2);
    let sweeps = [sweep(Collective::AllReduce, "raw")];
    let (table, _) = tune(&mut paper, &sweeps, 80.0);
    assert_eq!(table.cliffs(), Vec::<String>::new());
    let (worst, fall) = judge(&paper, &table, &sweeps[0]);
    assert!(worst < 1.08 && fall < 0.05, "{worst} {fall}");
}

#[test]
fn a_border_that_only_a_guess_makes_a_cliff_is_measured() {
    // From this size on `simple` is 20 us faster. Interpolation between the neighbouring sizes
    // cannot predict this jump.
    let mut paper = Paper::new(0.0);
    paper.step = (1_850_000, 20.0);
    let sweeps = [sweep(Collective::AllReduce, "raw")];
    let (table, notes) = tune(&mut paper, &sweeps, 80.0);
    assert_eq!(notes, Vec::<String>::new());
    assert_eq!(table.cliffs(), Vec::<String>::new());
    let (worst, fall) = judge(&paper, &table, &sweeps[0]);
    assert!(worst < 1.08 && fall < 0.05, "{worst} {fall}");
}

#[test]
fn blocks_that_bring_nothing_are_left_to_others() {
    let [few, some, many] =
        [8, 32, 64].map(|blocks| way(Algorithm::Direct, KernelProtocol::SIMPLE, blocks));
    let points = [
        [(8, 1.03), (32, 1.0), (64, 1.0)],
        [(8, 1.008), (32, 1.0), (64, 1.005)],
        // The variant of the next smaller size is as fast, but has more blocks.
        [(8, 1.0), (32, 1.001), (64, 1.0)],
        [(8, 1.015), (32, 1.0), (64, 0.999)],
        [(8, 1.4), (32, 1.03), (64, 1.0)],
    ];
    let points = points.map(|times| Point {
        size: 8,
        times: times
            .map(|(blocks, time)| (way(Algorithm::Direct, KernelProtocol::SIMPLE, blocks), time))
            .to_vec(),
    });
    assert_eq!(choose::variants(&points), [some, few, few, few, many]);
}

#[test]
fn the_next_sizes_way_is_taken_where_it_is_faster() {
    let (a, b) = (
        way(Algorithm::Ring, KernelProtocol::SIMPLE, 8),
        way(Algorithm::Direct, KernelProtocol::SIMPLE, 8),
    );
    let point = |size, times: &[(KernelVariant, f64)]| Point {
        size,
        times: times.to_vec(),
    };
    // At the second size `a` is 1.5 % slower than the fastest variant, so `a` is kept. At the third
    // size `b` is much faster.
    let points = [
        point(8, &[(a, 1.0e-6), (b, 2.0e-6)]),
        point(16, &[(a, 2.03e-6), (b, 2.0e-6)]),
        point(32, &[(a, 9.0e-6), (b, 2.1e-6)]),
    ];
    assert_eq!(choose::variants(&points), [a, a, b]);
    let mut later = points.clone();
    later[1] = point(16, &[(a, 2.03e-6), (b, 1.995e-6)]);
    assert_eq!(choose::variants(&later), [a, a, b]);
    // The line from 2.0 to 9.0 and the line from 2.0 to 2.1, on logarithmic axes, cross near the
    // smaller size.
    let entries = choose::entries(&sweep(Collective::AllReduce, "raw"), &points);
    let border = entries.iter().find(|entry| entry.variant == b).unwrap();
    assert!(border.from > 16 && border.from < 18, "{border:?}");
    assert!(entries.windows(2).all(|pair| pair[0].to == pair[1].from));
    assert_eq!(entries.last().unwrap().to, 32);
}

#[test]
fn a_way_ends_where_it_cannot_be() {
    let (a, b) = (
        way(Algorithm::OneShot, KernelProtocol::FUSED_LL, 8),
        way(Algorithm::Direct, KernelProtocol::SIMPLE, 8),
    );
    let low = Point {
        size: 1024,
        times: vec![(a, 1e-6), (b, 3e-6)],
    };
    let high = Point {
        size: 4096,
        times: vec![(b, 4e-6)],
    };
    let all = sweep(Collective::AllReduce, "raw");
    let entries = choose::entries(&all, &[low, high]);
    let ends: Vec<(usize, usize, KernelVariant)> = entries
        .iter()
        .map(|entry| (entry.from, entry.to, entry.variant))
        .collect();
    assert_eq!(ends, [(1024, 1025, a), (1025, 4096, b)]);
}

#[test]
fn sizes_are_a_factor_of_four_apart_and_end_with_the_largest() {
    assert_eq!(coarse(8, 1 << 10), [8, 32, 128, 512, 1024]);
    assert_eq!(coarse(8, 8), [8]);
    assert_eq!(coarse(8, 1 << 30).len(), 15);
}

fn options(line: &str) -> TuneOptions {
    parsed(line).unwrap()
}

#[test]
fn options_say_what_is_measured() {
    let names = |line: &str| -> Vec<String> {
        let sweeps = options(line).sweeps();
        let name = |sweep: &Sweep| format!("{} {}", sweep.collective, sweep.wire());
        sweeps.iter().map(name).collect()
    };
    assert_eq!(
        names("-o t"),
        [
            "all_reduce raw/4",
            "all_reduce linear8/4",
            "all_reduce dynamic8/4",
            "all_gather raw/4",
            "reduce_scatter raw/4"
        ]
    );
    assert_eq!(
        names("-o t --collectives all_gather --codecs raw,linear8 -d f32,bf16,f16,i32"),
        [
            "all_gather raw/4",
            "all_gather linear8/4",
            "all_gather raw/2",
            "all_gather linear8/2"
        ]
    );
    let check = |line: &str| options(line).check(&Config::default());
    assert_eq!(check("-o t --device gpu --gpus 4 --procs"), Ok(()));
    for (line, word) in [
        ("-o t", "--device gpu"),
        ("-o t --device gpu --graph", "--graph"),
        ("-o t --device gpu --ranks-per-gpu 2", "--ranks-per-gpu"),
        ("-o t --device gpu -b 2K -e 1K", "-b 2048"),
        ("-o t --device gpu --codecs linear8 -d i32", "no codec"),
        ("-o t --device gpu --codecs auto:linear8", "leave out auto"),
    ] {
        let error = check(line).unwrap_err();
        assert!(error.contains(word), "{line}: {error}");
    }
    for (name, value) in [
        ("CINCH_ALGO", "ring"),
        ("CINCH_CODEC", "off"),
        ("CINCH_CODEC_RULES", "*=linear8"),
    ] {
        let mut config = Config::default();
        config.set(name, value, Origin::Environment).unwrap();
        let error = options("-o t --device gpu").check(&config).unwrap_err();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_table_that_cannot_be_written_is_refused_before_it_is_measured() {
    let folder = std::env::temp_dir().join(format!("cinch-tune-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("taken")).unwrap();
    let table = |name: &str| {
        let path = folder.join(name);
        let line = format!("--device gpu -o {}", path.display());
        let options: TuneOptions = parsed(&line).unwrap();
        let made = Tune { options: &options }.output(2);
        (made.map(drop), options.log())
    };
    let (refused, log) = table("nowhere/t.tune");
    assert!(refused.unwrap_err().message().contains("-o "));
    assert!(!log.exists());
    let (refused, log) = table("taken");
    assert!(refused.is_err() && !log.exists());
    let (made, log) = table("t.tune");
    assert!(made.is_ok() && !log.exists() && !folder.join("t.tune").exists());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_table_for_ranks_that_differ_is_refused() {
    let alike = threads::run(3, Flaw::None, |world| {
        agree(&shared_texts(world, "NVIDIA H200 over NVLink").unwrap())
    });
    assert!(alike.iter().all(|agreed| agreed.is_ok()));
    let differing = threads::run(3, Flaw::None, |world| {
        let links = ["PCIe", "PCIe", "NVLink + PCIe"][world.rank()];
        agree(&shared_texts(world, &format!("NVIDIA L4 over {links}")).unwrap())
    });
    for agreed in differing {
        let said = agreed.unwrap_err().to_string();
        let differ = "rank 0 has NVIDIA L4 over PCIe, but rank 2 has NVIDIA L4 over NVLink + PCIe";
        assert!(said.contains(differ), "{said}");
    }
}
