use super::*;
use crate::cpu::Isa;
use crate::plan::gpu_tests::{limits, request};
use crate::plan::{Planner, Request};
use crate::types::{CallTuning, DType, Protocol};

const TEXT: &str = "\
cinch tuning 2
gpu NVIDIA Test
ranks 4
links NVLink
date 2026-01-02
cinch 0.1.0
command cinch tune -o t.tune
# a remark

all_reduce raw/4 8 65536 oneshot fused ll 16 0 3.000 6.000
all_reduce raw/4 65536 4194304 ring schedule simple 8 4096 6.000 48.000
all_reduce linear8/4 8 1024 direct schedule simple 4 0 9.000 9.500
all_gather raw/4 8 1024 direct schedule ll 4 0 5.000 5.500
";

fn table() -> TuningTable {
    TuningTable::parse("t.tune", TEXT).unwrap()
}

fn raw(element_bytes: usize) -> WireClass {
    WireClass {
        codec: CodecKind::Raw,
        element_bytes,
    }
}

fn site(gpu: &str, ranks: usize) -> Site {
    Site {
        gpu: gpu.into(),
        ranks,
        links: "NVLink".into(),
    }
}

#[test]
fn a_table_is_read_and_written_alike() {
    let table = table();
    assert_eq!(table.header.gpu, "NVIDIA Test");
    assert_eq!(
        (table.header.ranks, table.header.command.as_str()),
        (4, "cinch tune -o t.tune")
    );
    let entries: Vec<TableEntry> = table.entries().copied().collect();
    let again = TuningTable::parse("t.tune", &table.header.write(&entries)).unwrap();
    assert_eq!(again.header, table.header);
    assert!(again.entries().zip(&entries).all(|(a, b)| a == b));
    assert_ne!(again.fingerprint(), table.fingerprint());
}

#[test]
fn choices_are_by_size() {
    let table = table();
    let at = |bytes| {
        let choice = table.choice(Collective::AllReduce, raw(4), bytes).unwrap();
        let line = choice.line.unwrap();
        (line.number, (line.seconds * 1e9).round())
    };
    // Between the two sizes of an entry, log(time) is linear in log(size).
    assert_eq!(at(8), (10, 3000.0));
    assert_eq!(at((8.0 * 65536f64).sqrt() as usize).0, 10);
    assert!((at(724).1 - (3000.0 * 6000f64).sqrt()).abs() < 2.0);
    assert_eq!((at(65535).0, at(65536)), (10, (11, 6000.0)));
    // Sizes below the first entry take its time; beyond the last entry the time grows with the
    // bytes.
    assert_eq!((at(1), at(4 << 20)), ((10, 3000.0), (11, 48000.0)));
    assert_eq!((at(5 << 20).1, at(1 << 26).1), (60000.0, 768_000.0));
    let far = table.choice(Collective::AllReduce, raw(4), 1 << 27);
    assert_eq!(far, None);
    let line = |collective, wire| {
        let choice = table.choice(collective, wire, 100)?;
        choice.line.map(|line| line.number)
    };
    assert_eq!(line(Collective::AllReduce, raw(4)), Some(10));
    // A raw call may use table entries for another element size; a coded call may not.
    assert_eq!(line(Collective::AllGather, raw(2)), Some(13));
    assert_eq!(line(Collective::AllReduce, raw(2)), Some(10));
    assert_eq!(line(Collective::Broadcast, raw(4)), None);
    let linear8 = |element_bytes| WireClass {
        codec: CodecKind::Linear8,
        element_bytes,
    };
    assert_eq!(line(Collective::AllReduce, linear8(4)), Some(12));
    assert_eq!(line(Collective::AllReduce, linear8(2)), None);
}

#[test]
fn sizes_that_are_left_to_the_model_have_no_choice() {
    let last = "all_reduce raw/4 65536 4194304 ring schedule simple 8 4096 6.000 48.000\n";
    let text = TEXT.replace(last, &format!("{last}all_reduce raw/4 model 4194304\n"));
    let table = TuningTable::parse("t.tune", &text).unwrap();
    let has = |wire, bytes| table.choice(Collective::AllReduce, wire, bytes).is_some();
    assert!(has(raw(4), 4_194_303) && !has(raw(4), 4_194_304));
    let linear8 = WireClass {
        codec: CodecKind::Linear8,
        element_bytes: 4,
    };
    assert!(has(linear8, 16_000));
    for wrong in ["raw/4 model 65536", "raw/2 model 4194304", "raw/4 model x"] {
        let text = text.replace("raw/4 model 4194304", wrong);
        let error = TuningTable::parse("t.tune", &text).unwrap_err();
        assert!(error.message().contains("line 12"), "{error}");
    }
}

#[test]
fn no_choice_follows_where_all_larger_sizes_are_left_to_the_model() {
    let last = "all_reduce raw/4 65536 4194304 ring schedule simple 8 4096 6.000 48.000\n";
    let model = "all_reduce raw/4 model 4194304\n";
    let behind = "all_reduce raw/4 4194304 8388608 ring schedule simple 8 4096 48.000 90.000\n";
    assert!(TuningTable::parse("t.tune", &TEXT.replace(last, &format!("{last}{behind}"))).is_ok());
    let text = TEXT.replace(last, &format!("{last}{model}{behind}"));
    let error = TuningTable::parse("t.tune", &text).unwrap_err();
    let said = "all_reduce raw/4 from 4194304 on is left to the model";
    assert!(error.message().contains(said), "{error}");
}

#[test]
fn smaller_sizes_that_are_left_to_the_model_have_no_choice() {
    let first = "all_reduce linear8/4 8 1024 direct schedule simple 4 0 9.000 9.500\n";
    let below = "all_reduce linear8/4 model below 8\n";
    let text = TEXT.replace(first, &format!("{below}{first}"));
    let table = TuningTable::parse("t.tune", &text).unwrap();
    let has = |codec, bytes| {
        let wire = WireClass {
            codec,
            element_bytes: 4,
        };
        table.choice(Collective::AllReduce, wire, bytes).is_some()
    };
    assert!(has(CodecKind::Linear8, 8) && !has(CodecKind::Linear8, 7));
    assert!(has(CodecKind::Raw, 7));
    let others = ["linear8/4 model below 9", "linear8/2 model below 8"];
    for wrong in others.map(|wrong| below.replace("linear8/4 model below 8", wrong)) {
        let error = TuningTable::parse("t.tune", &text.replace(below, &wrong)).unwrap_err();
        assert!(error.message().contains("line 12"), "{error}");
    }
    for (text, line) in [
        (format!("{TEXT}{below}"), "line 14"),
        (text.replace(below, &below.repeat(2)), "line 12"),
        (TEXT.replace(first, &format!("{first}{below}")), "line 13"),
    ] {
        let error = TuningTable::parse("t.tune", &text).unwrap_err();
        assert!(error.message().contains(line), "{error}");
    }
}

/// A size left to the cost model does not take the line of the next larger size. On 8 H200 GPUs that line
/// would take more than twice the time of a fused kernel.
#[test]
fn small_calls_of_eight_are_not_led_by_lines_of_large_ones() {
    let site = site("NVIDIA H200", 8);
    let Tuning::Table(table) = Tuning::of_library(&vec![site; 8]).unwrap() else {
        panic!("no table for 8 H200")
    };
    for (collective, from) in [
        (Collective::AllReduce, (2 << 20) + 1),
        (Collective::AllGather, 2 << 20),
        (Collective::ReduceScatter, 2 << 20),
        (Collective::AllToAll, 2 << 20),
    ] {
        let has = |bytes| table.choice(collective, raw(4), bytes).is_some();
        assert!(
            has(from) && !has(from - 1) && !has(from / 2),
            "{collective}"
        );
        let mut planner = Planner::new(limits(8, 132), 0, Isa::Scalar);
        planner.tune(Tuning::Table(table.clone()));
        let blocks = if collective == Collective::AllReduce {
            1
        } else {
            8
        };
        for bytes in [128 << 10, 256 << 10, 512 << 10, 1 << 20] {
            let asked = request(collective, bytes / 4 / blocks, "raw");
            let plan = planner.plan(&asked).unwrap();
            assert!(plan.kernel.is_fused(), "{collective} {bytes}");
        }
    }
}

#[test]
fn what_is_no_table_is_named_with_its_line() {
    let broken = [
        ("cinch tuning 2", "cinch tuning 1", "line 1"),
        ("ranks 4", "ranks 1", "line 3"),
        ("links NVLink\n", "", "\"links"),
        ("ranks 4\n", "ranks 4\nranks 4\n", "twice"),
        (
            "raw/4 65536 4194304",
            "raw/4 70000 4194304",
            "line 10 ends at 65536",
        ),
        ("all_gather", "allgather", "allgather"),
        ("all_gather raw/4", "all_gather raw/3", "raw/3"),
        ("linear8/4", "linear9/4", "linear9"),
        ("schedule ll ", "schedule ll64 ", "ll64"),
        ("schedule ll ", "interpreter ll ", "interpreter"),
        ("fused ll ", "fused simple ", "no fused kernel"),
        ("direct schedule ll ", "tree schedule ll ", "no tree"),
        ("fused ll 16 0", "fused ll 129 0", "129 blocks"),
        (
            "8 1024 direct schedule ll",
            "1024 1024 direct schedule ll",
            "none",
        ),
        ("5.000 5.500", "5.000 -1", "-1"),
        ("5.000 5.500", "5.000", "10 words"),
        ("all_gather raw/4", "all_reduce raw/4", "together"),
    ];
    for (from, to, word) in broken {
        assert!(TEXT.contains(from), "{from}");
        let error = TuningTable::parse("t.tune", &TEXT.replace(from, to)).unwrap_err();
        let message = error.message();
        assert!(
            message.contains("t.tune, line") && message.contains(word),
            "{to}: {message}"
        );
    }
    let head: String = TEXT
        .lines()
        .take(7)
        .map(|line| format!("{line}\n"))
        .collect();
    let error = TuningTable::parse("t", &head).unwrap_err();
    assert!(error.message().contains("no choices"), "{error}");
}

#[test]
fn cliffs_are_found_within_lines_and_between_them() {
    assert_eq!(table().cliffs(), Vec::<String>::new());
    for (from, to) in [
        ("0 3.000 6.000", "0 7.000 6.000"),
        ("4096 6.000 48.000", "4096 5.600 48.000"),
        ("4096 6.000 48.000", "4096 6.000 5.000"),
    ] {
        let table = TuningTable::parse("t", &TEXT.replace(from, to)).unwrap();
        assert!(!table.cliffs().is_empty(), "{to}");
    }
}

#[test]
fn a_table_is_for_its_gpus_ranks_and_links() {
    let tables = [Arc::new(table())];
    let among = |said: &[Site]| Tuning::among(&tables, said).unwrap();
    let same = vec![site("NVIDIA Test", 4); 4];
    assert_eq!(among(&same), Tuning::Table(tables[0].clone()));
    let mut mixed = same.clone();
    mixed[2].gpu = "NVIDIA Other".into();
    for (said, word) in [
        (
            vec![site("NVIDIA Test", 8); 8],
            "no table for NVIDIA Test x 8",
        ),
        (
            vec![site("NVIDIA Other", 4); 4],
            "no table for NVIDIA Other",
        ),
        (mixed.clone(), "differ"),
    ] {
        match among(&said) {
            Tuning::Model(why) => assert!(why.contains(word), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    let of_file = |said: &[Site]| Tuning::of_file(tables[0].clone(), said);
    assert_eq!(of_file(&same), Tuning::Table(tables[0].clone()));
    let Tuning::Model(error) = of_file(&mixed) else {
        panic!("a table of other GPUs is used");
    };
    assert!(error.contains("rank 2 has NVIDIA Other"), "{error}");
    assert_eq!(links(["NVLink", "NVLink"].into_iter()), "NVLink");
    assert_eq!(links(["PCIe", "NVLink"].into_iter()), "NVLink + PCIe");
}

fn planner(tuning: Tuning) -> Planner {
    let mut planner = Planner::new(limits(4, 132), 0, Isa::Scalar);
    planner.tune(tuning);
    planner
}

fn all_reduce(bytes: usize, codec: &str) -> Request {
    request(Collective::AllReduce, bytes / 4, codec)
}

#[test]
fn plans_are_those_of_the_table() {
    let mut planner = planner(Tuning::Table(Arc::new(table())));
    let plan = planner.plan(&all_reduce(1 << 20, "raw")).unwrap();
    assert_eq!(
        (plan.algorithm, plan.kernel),
        (Algorithm::Ring, KernelProtocol::SIMPLE)
    );
    assert_eq!((plan.channels, plan.geometry.chunk()), (8, 1024));
    let seconds = planner.predict(&all_reduce(65536, "raw")).unwrap();
    assert!((seconds - 6e-6).abs() < 1e-9, "{seconds}");
    let mut least = 0.0f64;
    // The table has lines for these sizes; the cost model is not fitted to the simulated GPUs.
    let sizes = std::iter::successors(Some(8), |size| Some(size + size / 4));
    for size in sizes.take_while(|&size| size <= 64 << 20) {
        let seconds = planner.predict(&all_reduce(size, "raw")).unwrap();
        assert!(seconds >= 0.95 * least, "{size}: {seconds} after {least}");
        least = least.max(seconds);
    }
    // `auto:` runs a codec at the sizes at which it is faster by the table's lines or by the model.
    planner.trust_predictions("linear8");
    let auto = |bytes| all_reduce(bytes, "auto:linear8");
    assert!(planner.plan(&auto(4 << 20)).unwrap().specs.is_lossy());
    assert!(!planner.plan(&auto(1 << 10)).unwrap().specs.is_lossy());
    // For an element size that was not measured, a coded call takes the cost model's time, and a raw call
    // takes the line of f32.
    let model = Planner::new(limits(4, 132), 0, Isa::Scalar);
    let halves = |codec| Request {
        dtype: DType::BF16,
        ..all_reduce(1 << 20, codec)
    };
    let [coded, raw] = ["linear8", "raw"].map(halves);
    let by_model = model.predict(&coded).unwrap();
    assert_eq!(planner.predict(&coded).unwrap(), by_model);
    let of_f32 = planner.predict(&all_reduce(1 << 19, "raw")).unwrap();
    assert_eq!(planner.predict(&raw).unwrap(), of_f32);
}

/// Beyond the last line, the time of a raw call grows with the bytes. A constant time would seem cheaper than
/// the model's prediction with a codec, so that the codec would never run.
#[test]
fn a_codec_that_pays_at_the_last_size_pays_beyond_it() {
    let without_codecs: String = TEXT
        .lines()
        .filter(|line| !line.contains("linear8"))
        .map(|line| format!("{line}\n"))
        .collect();
    let table = TuningTable::parse("t.tune", &without_codecs).unwrap();
    let mut planner = planner(Tuning::Table(Arc::new(table)));
    planner.trust_predictions("linear8");
    for bytes in [4 << 20, 8 << 20, 16 << 20, 64 << 20] {
        let auto = all_reduce(bytes, "auto:linear8");
        let plan = planner.plan(&auto).unwrap();
        let explained = planner.explain(&auto).unwrap();
        assert!(plan.specs.inter.is_lossy(), "{explained}");
        assert!(explained.contains("so linear8"), "{explained}");
    }
}

#[test]
fn what_was_asked_for_wins() {
    let mut planner = planner(Tuning::Table(Arc::new(table())));
    let asked = Request {
        algorithm: Some(Algorithm::Tree),
        ..all_reduce(1 << 20, "raw")
    };
    assert_eq!(planner.plan(&asked).unwrap().algorithm, Algorithm::Tree);
    let explained = planner.explain(&asked).unwrap();
    assert!(
        explained.contains("cost model: the call asks"),
        "{explained}"
    );
    let mut asked = all_reduce(1 << 20, "raw");
    let measured = planner.plan(&asked).unwrap();
    asked.tuning.protocol = Some(Protocol::Ll);
    assert_eq!(planner.plan(&asked).unwrap().kernel.protocol, Protocol::Ll);
    // The table's choice stays where a call bounds the channels alone.
    asked.tuning = CallTuning {
        protocol: None,
        kernel: None,
        max_channels: std::num::NonZeroU8::new(1),
    };
    let bounded = planner.plan(&asked).unwrap();
    assert_eq!(
        (bounded.algorithm, bounded.kernel),
        (measured.algorithm, measured.kernel)
    );
    assert_eq!(bounded.channels, 1);
    assert!(measured.channels > 1);
}

#[test]
fn a_way_that_cannot_be_here_leaves_the_call_to_the_model() {
    let mut few = limits(4, 132);
    let gpu = few.gpu.as_mut().unwrap();
    gpu.oneshot_bytes = 1 << 10;
    let mut planner = Planner::new(few.clone(), 0, Isa::Scalar);
    let model = planner.predict(&all_reduce(1 << 14, "raw")).unwrap();
    planner.tune(Tuning::Table(Arc::new(table())));
    assert_eq!(planner.predict(&all_reduce(1 << 14, "raw")).unwrap(), model);
    let explained = planner.explain(&all_reduce(1 << 14, "raw")).unwrap();
    assert!(
        explained.contains("cost model: oneshot fused"),
        "{explained}"
    );
}

#[test]
fn an_explanation_names_the_line_or_why_there_is_none() {
    let tuned = planner(Tuning::Table(Arc::new(table())));
    let text = tuned.explain(&all_reduce(1 << 20, "raw")).unwrap();
    assert!(
        text.contains("measured on NVIDIA Test x 4 over NVLink, 2026-01-02, table t.tune line 11"),
        "{text}"
    );
    let marked: Vec<&str> = text.lines().filter(|line| line.contains("<- ")).collect();
    assert_eq!(marked.len(), 1, "{text}");
    assert!(
        marked[0].contains("ring") && marked[0].contains("<- measured"),
        "{text}"
    );
    let model = planner(Tuning::Model("no table for X x 3 over PCIe".into()));
    let text = model.explain(&all_reduce(1 << 20, "raw")).unwrap();
    assert!(text.contains("cost model: no table for X x 3"), "{text}");
    assert!(text.contains("<- cheapest"), "{text}");
}

#[test]
fn ways_are_different_and_each_can_be_taken() {
    for codec in ["raw", "linear8"] {
        for bytes in [8, 4 << 10, 256 << 10, 64 << 20] {
            let asked = all_reduce(bytes, codec);
            let mut planner = planner(Tuning::Model("none".into()));
            let variants = planner.variants(&asked).unwrap();
            assert!(
                variants.len() >= 2 || bytes == 8,
                "{codec} {bytes}: {variants:?}"
            );
            assert!(variants.len() <= 64, "{codec} {bytes}: {}", variants.len());
            let mut seen = Vec::new();
            for variant in variants {
                planner.tune(Tuning::Always(variant));
                let plan = planner.plan(&asked).unwrap();
                let taken = (
                    plan.algorithm,
                    plan.kernel,
                    plan.channels,
                    plan.geometry.chunk(),
                );
                assert_eq!((taken.0, taken.1), (variant.algorithm, variant.kernel));
                assert!(
                    !seen.contains(&taken),
                    "{codec} {bytes}: {variant} is another"
                );
                seen.push(taken);
            }
        }
    }
}
