//! Drift tests: a C compiler reads `kernels/abi.h` and prints the same sizes, offsets and numbers.

use super::*;
use crate::schedule::Op;
use crate::types::CallStatistics;
use std::io::Write;
use std::mem::offset_of;
use std::process::Command;

/// Returns lines "name value" for the Rust structs, in the order in which the C program prints
/// them.
fn rust_layout() -> String {
    let mut text = String::new();
    macro_rules! line {
        ($what:expr, $number:expr) => {
            text += &format!("{} {}\n", $what, $number as usize)
        };
    }
    macro_rules! fields {
        ($name:literal, $type:ty, $($field:ident)*) => {
            line!($name, size_of::<$type>());
            $(line!(concat!($name, ".", stringify!($field)), offset_of!($type, $field));)*
        };
    }
    fields!("cinch_counters", Counters, tail head);
    fields!("cinch_fifo", Fifo, counters slots stride slot_bytes depth channels);
    fields!("cinch_cursor", Cursor, sent received);
    fields!("cinch_trouble", Trouble, state kind peer sends channel step pass protocol expected seen
        mine theirs);
    fields!("cinch_control", Control, abort trouble);
    fields!("cinch_step", KernelStep, op own own_after batch stage part in_block out_block intra_recv intra_send peers
        nrecv nsend recv_mask send_mask);
    fields!("cinch_residuals", ResidualsHeader, turn arrived);
    fields!("cinch_scales", ScalesHeader, calls arrived);
    fields!("cinch_work", KernelWork, input output count chunk factor signature signature_hash residuals
        span scales statistics parts passes first_block channels first_channel stages steps nsteps combine flags ends
        intra codec);
    fields!("cinch_statistics", CallStatistics, saturated non_finite sum_squares abs_max verdict known has_input
        unused);
    fields!("cinch_statistics_sums", StatisticsSums, saturated non_finite sum_squares abs_max verdict arrived);
    fields!("cinch_statistics_args", StatisticsArgs, elements count sums result factor flags largest has_input
        unused);
    fields!("cinch_args", ScheduleArgs, comm overflow nworks nsteps npeers unused work_buffer);
    fields!("cinch_oneshot_args", OneshotArgs, comm area half epoch input output count factor
        signature_hash signature words share combine flags element_bytes root phases tile_lines unused
        codec residuals span);
    fields!("cinch_comm_view", CommView, inbox outbox cursors control timeout_ns rank nranks
        fifo protocol npeers ranks);
    for (name, number) in NUMBERS {
        line!(name, *number);
    }
    text
}

const NUMBERS: &[(&str, usize)] = &[
    ("CINCH_SIMPLE", Protocol::Simple as usize),
    ("CINCH_LL", Protocol::Ll as usize),
    ("CINCH_LL128", Protocol::Ll128 as usize),
    ("CINCH_PROTOCOLS", PROTOCOLS),
    ("CINCH_SEND", Op::Send as usize),
    ("CINCH_RECV", Op::Recv as usize),
    ("CINCH_COPY", Op::Copy as usize),
    ("CINCH_REDUCE", Op::Reduce as usize),
    ("CINCH_RECV_REDUCE_COPY", Op::RecvReduceCopy as usize),
    ("CINCH_RECV_REDUCE_SEND", Op::RecvReduceSend as usize),
    ("CINCH_RECV_COPY_SEND", Op::RecvCopySend as usize),
    (
        "CINCH_RECV_REDUCE_COPY_SEND",
        Op::RecvReduceCopySend as usize,
    ),
    (
        "CINCH_RECV_REDUCE_FINISH_SEND",
        Op::RecvReduceFinishSend as usize,
    ),
    ("CINCH_OWN_ABSENT", OWN_ABSENT as usize),
    ("CINCH_OWN_EXACT", OWN_EXACT as usize),
    ("CINCH_OWN_CODED", OWN_CODED as usize),
    ("CINCH_SUM", Combine::Sum as usize),
    ("CINCH_PROD", Combine::Prod as usize),
    ("CINCH_MAX", Combine::Max as usize),
    ("CINCH_MIN", Combine::Min as usize),
    ("CINCH_PREMULTIPLY", PREMULTIPLY as usize),
    ("CINCH_AVERAGE", AVERAGE as usize),
    ("CINCH_ALIGNED", ALIGNED as usize),
    ("CINCH_FACTOR_AT", FACTOR_AT as usize),
    ("CINCH_REDRAW", REDRAW as usize),
    ("CINCH_LAUNCH_DEPENDENTS", LAUNCH_DEPENDENTS as usize),
    ("CINCH_HAS_INPUT", HAS_INPUT as usize),
    ("CINCH_INTRA_CODED", INTRA_CODED as usize),
    ("CINCH_INTRA_RAW", INTRA_RAW as usize),
    ("CINCH_INTRA_CAST16", INTRA_CAST16 as usize),
    ("CINCH_INTRA_CAST_BF16", INTRA_CAST_BF16 as usize),
    ("CINCH_INTRA_LINEAR8", INTRA_LINEAR8 as usize),
    (
        "CINCH_VERDICT_NON_FINITE",
        CallStatistics::NON_FINITE as usize,
    ),
    ("CINCH_SUMS_OFFSET", SUMS_OFFSET),
    ("CINCH_SENDS_PARTS", SENDS_PARTS as usize),
    ("CINCH_SUMS", SUMS as usize),
    ("CINCH_SENDS_SUMS", SENDS_SUMS as usize),
    ("CINCH_TROUBLE_NONE", TROUBLE_NONE as usize),
    ("CINCH_TROUBLE_TIMEOUT", TROUBLE_TIMEOUT as usize),
    ("CINCH_TROUBLE_MISMATCH", TROUBLE_MISMATCH as usize),
    ("CINCH_RESIDUALS_BYTES", RESIDUALS_BYTES),
    ("CINCH_SCALES_BYTES", SCALES_BYTES),
    ("CINCH_ARGS_BYTES", ARGS_BYTES),
    ("CINCH_WORK_BUFFER_BYTES", WORK_BUFFER_BYTES),
    ("CINCH_LINE_BYTES", LINE_BYTES),
    ("CINCH_SIGNATURE_WORDS", SIGNATURE_WORDS),
    ("CINCH_MAX_BATCH", MAX_BATCH),
    ("CINCH_MAX_RANKS", MAX_RANKS),
    ("CINCH_MAX_PEERS", MAX_PEERS),
    ("CINCH_MAX_CHANNELS", MAX_CHANNELS),
    ("CINCH_BLOCK_THREADS", BLOCK_THREADS as usize),
    ("CINCH_STAGE_BYTES", STAGE_BYTES as usize),
    ("CINCH_SMALL_BLOCK_THREADS", SMALL_BLOCK_THREADS as usize),
    ("CINCH_SMALL_STAGE_BYTES", SMALL_STAGE_BYTES as usize),
    ("CINCH_FUSED_THREADS", FUSED_THREADS as usize),
    ("CINCH_STATISTICS_THREADS", STATISTICS_THREADS as usize),
    ("CINCH_TILE_WORDS", TILE_WORDS),
    ("CINCH_GRANULE_BYTES", crate::plan::GRANULE_BYTES),
    ("CINCH_KEPT_STEPS", crate::plan::KEPT_STEPS),
];

/// Returns a C program that prints the lines of `layout` with the header's values.
fn program(layout: &str) -> String {
    // The header includes abi.h.
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/channel/statistics.h");
    let mut text = format!("#include <stdio.h>\n#include \"{header}\"\nint main(void) {{\n");
    for line in layout.lines() {
        let what = line.split(' ').next().unwrap_or_default();
        let value = match what.split_once('.') {
            Some((name, field)) => format!("offsetof(struct {name}, {field})"),
            None if what.starts_with("CINCH") => what.to_string(),
            None => format!("sizeof(struct {what})"),
        };
        text += &format!("  printf(\"{what} %zu\\n\", (size_t)({value}));\n");
    }
    text + "  return 0;\n}\n"
}

#[test]
fn header_compiled_as_c_has_the_same_layout() {
    let stem = std::env::temp_dir().join(format!("cinch-abi-{}", std::process::id()));
    let compile = Command::new("cc")
        .args(["-std=c11", "-I"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"))
        .args(["-x", "c", "-", "-o"])
        .arg(&stem)
        .stdin(std::process::Stdio::piped())
        .spawn();
    let Ok(mut compiler) = compile else {
        println!("skipped: there is no C compiler called cc");
        return;
    };
    let layout = rust_layout();
    let input = compiler.stdin.take();
    input
        .unwrap()
        .write_all(program(&layout).as_bytes())
        .unwrap();
    assert!(compiler.wait().unwrap().success());
    let output = Command::new(&stem).output();
    std::fs::remove_file(&stem).unwrap();
    let printed = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(layout.lines().count() > 120);
    assert_eq!(layout, printed);
}

#[test]
fn header_asserts_the_same_sizes() {
    let text = include_str!("../../../kernels/abi.h");
    for (name, bytes) in [
        ("cinch_fifo", size_of::<Fifo>()),
        ("cinch_trouble", size_of::<Trouble>()),
        ("cinch_control", size_of::<Control>()),
        ("cinch_comm_view", size_of::<CommView>()),
    ] {
        let line = format!("static_assert(sizeof({name}) == {bytes}, \"abi\");");
        assert!(text.contains(&line), "{line}");
    }
    assert_eq!(cursors_bytes(32), 196_608);
    assert_eq!(size_of::<Counters>(), LINE_BYTES);
}
