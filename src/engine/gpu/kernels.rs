//! The kernels of a GPU, loaded before the first launch and found by name.
//!
//! Lazy loading could deadlock. The driver may load a kernel only when all running kernels have ended, and
//! one of those may wait for the new kernel.

use crate::codec::{FUSED_CODECS, KERNEL_CODECS, kernel_family};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{
    BLOCK_THREADS, FUSED_THREADS, SMALL_BLOCK_THREADS, SMALL_STAGE_BYTES, STAGE_BYTES,
    STATISTICS_THREADS,
};
use crate::gpu::{Context, Function, Module, kernels};
use crate::plan::{FUSED128_DTYPES, Plan, Request, Resident};
use crate::sys::process::block_signals;
use crate::types::{
    Algorithm, CodecKind, Collective, DType, Kernel, Protocol, ReduceOp, Scalar, ScaleRule,
};
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Prefix of the names of all kernels that take part in collectives (`CINCH_KERNEL_NAME` in
/// `kernels/entry/name.cuh`). PyTorch's profiler and Holistic Trace Analysis count a kernel as communication
/// by it.
pub const KERNEL_PREFIX: &str = "ncclDevKernel_cinch_";

/// The begin of the names of kernels that take statistics. They exchange nothing, so they do not count as communication.
pub const STATISTICS_PREFIX: &str = "cinch_statistics_";

/// Block size of a kernel. A schedule kernel's block drives one channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// Threads of a block. In a schedule kernel, 64 of them wait for peers, 32 publish messages, and the
    /// others move data.
    pub threads: u32,
    /// Bytes of dynamic shared memory, into which codec kernels prefetch.
    pub shared: u32,
}

/// Threads of a schedule kernel's block that move no data. A fused kernel has none.
const CONTROL_THREADS: u32 = 96;

/// Returns the block size of a kernel. The kernel's thread limit shows for which GPUs its code was compiled.
pub fn shape(function: &Function) -> BlockShape {
    if is_statistics(function.name()) {
        return BlockShape {
            threads: STATISTICS_THREADS,
            shared: 0,
        };
    }
    let does = function.name().strip_prefix(KERNEL_PREFIX);
    let does = does.unwrap_or_default();
    let (aside, is_coded) = match does.strip_prefix("fused_") {
        Some(fused) if !is_through_codec(fused) => {
            return BlockShape {
                threads: FUSED_THREADS,
                shared: 0,
            };
        }
        Some(_) => (0, true),
        None => (CONTROL_THREADS, does.starts_with("coded_")),
    };
    let (threads, stage) = if function.max_threads < BLOCK_THREADS - CONTROL_THREADS + aside {
        (SMALL_BLOCK_THREADS, SMALL_STAGE_BYTES)
    } else {
        (BLOCK_THREADS, STAGE_BYTES)
    };
    let movers = threads - CONTROL_THREADS;
    BlockShape {
        threads: movers + aside,
        shared: if is_coded { movers / 32 * stage } else { 0 },
    }
}

/// Returns whether this is the name of a kernel that takes statistics, whose blocks wait for no other rank.
fn is_statistics(name: &str) -> bool {
    name.starts_with(STATISTICS_PREFIX)
}

/// Returns whether the fused kernel with this name has a codec.
fn is_through_codec(does: &str) -> bool {
    let mut families = FUSED_CODECS.map(kernel_family).into_iter();
    families.any(|family| does.starts_with(family))
}

/// Returns whether the kernels of `kernels/entry/ENTRY.cu` take part in collectives. The kernels of other files
/// convert arrays, probe paths and serve tests.
fn serves_collectives(entry: &str) -> bool {
    let begins = ["fused_", "raw_", "coded_"];
    entry == "move" || begins.iter().any(|begin| entry.starts_with(begin))
}

/// Most threads that load modules. Unpacking takes a processor, and so does the driver's compiler for PTX.
const LOADERS: usize = 4;

/// Loads the modules that serve collectives, and that of their statistics.
///
/// # Errors
/// The errors of [`kernels::load`], of the first module that a thread could not load.
fn load_modules(context: &Arc<Context>) -> Result<Vec<Arc<Module>>> {
    // The first module is loaded by name, because `kernels::load` fails with the cause if the build has no
    // kernels.
    let mut modules = vec![kernels::load(context, "move")?];
    let is_wanted = |name: &str| name != "move" && serves_collectives(name) || name == "statistics";
    let parts = kernels::parts(context, is_wanted);
    let next = AtomicUsize::new(0);
    let loader = || -> Result<Vec<Arc<Module>>> {
        let mut loaded = Vec::new();
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            // After an error the other threads end with the part that they load.
            let modules = kernels::load_group(context, part)
                .inspect_err(|_| next.store(parts.len(), Ordering::Relaxed))?;
            loaded.extend(modules);
        }
        Ok(loaded)
    };
    std::thread::scope(|scope| {
        // If the system refuses a thread, the others load its parts.
        let threads: Vec<_> = (1..LOADERS.min(parts.len()))
            .filter_map(|_| {
                let thread = std::thread::Builder::new().name("cinch-load".into());
                let body = || {
                    block_signals();
                    loader()
                };
                thread.spawn_scoped(scope, body).ok()
            })
            .collect();
        modules.extend(loader()?);
        for thread in threads {
            modules.extend(
                thread
                    .join()
                    .map_err(|_| Error::internal("a loading thread panicked"))??,
            );
        }
        Ok(modules)
    })
}

/// Kernels that are loaded on one GPU.
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    functions: HashMap<String, Function>,
}

impl Kernels {
    /// Returns the kernels of the GPU of `context`. The first communicator of the process on that GPU loads
    /// them.
    ///
    /// # Errors
    /// Unsupported if the build has no kernels for this GPU; the driver's errors.
    pub fn of(context: &Arc<Context>) -> Result<Arc<Kernels>> {
        static LOADED: Mutex<Vec<Weak<Kernels>>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|weak| weak.strong_count() > 0);
        let same = |kernels: &Arc<Kernels>| {
            Arc::ptr_eq(kernels.context.driver(), context.driver())
                && kernels.context.handle() == context.handle()
        };
        if let Some(known) = loaded.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(known);
        }
        let modules = load_modules(context)?;
        let found = Arc::new(Kernels::find_in(context, &modules)?);
        loaded.push(Arc::downgrade(&found));
        Ok(found)
    }

    /// Finds all kernels in `modules`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn find_in(context: &Arc<Context>, modules: &[Arc<Module>]) -> Result<Kernels> {
        let mut functions = HashMap::new();
        for name in names() {
            for module in modules {
                match module.function(&name) {
                    Ok(function) => {
                        let shared = shape(&function).shared;
                        if shared > 0 {
                            function.allow_shared(shared)?;
                        }
                        functions.insert(name, function);
                        break;
                    }
                    Err(error) if error.kind() == ErrorKind::Internal => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Kernels {
            context: context.clone(),
            functions,
        })
    }

    /// Returns the kernel of this name.
    ///
    /// # Errors
    /// Unsupported if the build lacks it.
    pub fn find(&self, name: &str) -> Result<&Function> {
        self.functions.get(name).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("this build of cinch has no kernel {name}; use another codec or protocol"),
            )
        })
    }

    /// Returns how many blocks can be resident on the GPU at once, for any schedule kernel and for any fused
    /// kernel.
    ///
    /// # Errors
    /// Internal if a kernel does not fit a multiprocessor; the driver's errors.
    pub fn resident(&self) -> Result<Resident> {
        let begin = format!("{KERNEL_PREFIX}fused_");
        let is_fused = |name: &str| name.starts_with(&begin);
        Ok(Resident {
            channels: self.blocks(|name| !is_fused(name) && !is_statistics(name))?,
            fused: self.blocks(is_fused)?,
        })
    }

    /// Returns how many blocks can be resident on the GPU at once, for any kernel whose name
    /// `counts` accepts.
    fn blocks(&self, counts: impl Fn(&str) -> bool) -> Result<usize> {
        let mut least = u32::MAX;
        let functions = self.functions.values();
        for function in functions.filter(|function| counts(function.name())) {
            let BlockShape { threads, shared } = shape(function);
            let blocks = function.blocks_per_multiprocessor(threads, shared)?;
            if blocks == 0 {
                return Err(Error::internal(format!(
                    "no block of {threads} threads of {} fits a multiprocessor of {}",
                    function.name(),
                    self.context.device()
                )));
            }
            least = least.min(blocks);
        }
        let multiprocessors = self.context.device().multiprocessors;
        Ok(least.saturating_mul(multiprocessors) as usize)
    }
}

/// Rejects a call that has no kernel on any GPU. The check depends on the call only, so all ranks
/// reject it together.
///
/// # Errors
/// Unsupported if the codec has no kernels, or if it keeps scales, and the call is a message, names no tensor, or
/// has a factor in device memory.
pub fn check(request: &Request) -> Result<()> {
    let spec = request.codec.inter;
    let why = if spec.is_lossy() && !KERNEL_CODECS.contains(&spec.kind) {
        format!(
            "{} has no kernels and works on host buffers only; take one of raw, {}",
            spec.kind.name(),
            KERNEL_CODECS.map(CodecKind::name).join(", ")
        )
    } else if spec.kind.has_scale()
        && matches!(spec.scale, ScaleRule::Tensor { .. })
        && let Some(call) = why_no_kept_scales(request)
    {
        format!(
            "a GPU keeps no scales from call to call for {call}; give the codec a block (\"{}:block=256\")",
            spec.kind.name()
        )
    } else {
        return Ok(());
    };
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("{} with codec {spec} on a GPU: {why}", request.collective),
    ))
}

/// Returns what kind of call this is, if a GPU cannot keep scales for it.
fn why_no_kept_scales(request: &Request) -> Option<&'static str> {
    if request.collective.is_message() {
        Some("messages")
    } else if request.tensor.is_none() {
        Some("calls without a tensor id")
    } else if matches!(request.op, ReduceOp::PreMulSum(Scalar::Device(_))) {
        // The scale of one factor would encode contributions that another factor multiplies.
        Some("factors in device memory")
    } else {
        None
    }
}

/// Returns the name of the kernel that runs a plan.
pub fn name_for(plan: &Plan) -> String {
    let suffix = match (plan.kernel.kernel, plan.kernel.protocol) {
        (Kernel::Schedule, Protocol::Simple) => "",
        (Kernel::Schedule, Protocol::Ll) => "_ll",
        (Kernel::Schedule, Protocol::Ll128) => "_ll128",
        (Kernel::Fused, protocol) => {
            let end = match protocol {
                Protocol::Ll128 => "_ll128",
                _ => "_ll",
            };
            if plan.codec.is_some() {
                let family = kernel_family(plan.specs.inter.kind);
                return fused_name(family, plan.dtype, end);
            }
            let begin = match (plan.collective, plan.algorithm) {
                (Collective::ReduceScatter | Collective::AllToAll, _) => "scatter_",
                (Collective::AllReduce, Algorithm::Direct) => "two_shot_",
                (Collective::Broadcast, _) => "from_root_",
                (Collective::Reduce, _) => "to_root_",
                _ => "",
            };
            return match plan.collective.reduces() {
                true => format!("{KERNEL_PREFIX}fused_{begin}{}{end}", plan.dtype),
                false => format!("{KERNEL_PREFIX}fused_{begin}move{end}"),
            };
        }
    };
    if plan.codec.is_some() {
        format!(
            "{KERNEL_PREFIX}coded_{}_{}",
            kernel_family(plan.specs.inter.kind),
            plan.dtype
        )
    } else if plan.collective.reduces() {
        format!("{KERNEL_PREFIX}raw_{}{suffix}", plan.dtype)
    } else {
        format!("{KERNEL_PREFIX}move{suffix}")
    }
}

/// Returns the name of the fused kernel through the codecs of a family; `end` is that of its protocol.
fn fused_name(family: &str, dtype: DType, end: &str) -> String {
    format!("{KERNEL_PREFIX}fused_{family}_{dtype}{end}")
}

/// Returns whether the kernel of [`name_for`] takes the verdict of what it stores: those of codecs and of reductions of
/// floats, in schedules of protocol simple.
pub fn takes_verdict(plan: &Plan) -> bool {
    let is_simple =
        (plan.kernel.kernel, plan.kernel.protocol) == (Kernel::Schedule, Protocol::Simple);
    let inspects = plan.codec.is_some() || plan.collective.reduces() && plan.dtype.is_float();
    is_simple && inspects
}

/// Returns all names that [`name_for`] can return.
fn names() -> Vec<String> {
    let suffixes = ["", "_ll", "_ll128"];
    let mut names: Vec<String> = suffixes
        .iter()
        .map(|suffix| format!("{KERNEL_PREFIX}move{suffix}"))
        .collect();
    let fused = |begins: &[&str], does: &str| {
        begins
            .iter()
            .map(|begin| format!("{KERNEL_PREFIX}fused_{begin}{does}"))
            .collect::<Vec<_>>()
    };
    for end in ["_ll", "_ll128"] {
        names.extend(fused(&["", "scatter_"], &format!("move{end}")));
    }
    for dtype in FUSED128_DTYPES {
        names.extend(fused(
            &["", "scatter_", "two_shot_", "to_root_"],
            &format!("{dtype}_ll128"),
        ));
    }
    names.extend(fused(&["from_root_"], "move_ll128"));
    for family in FUSED_CODECS.map(kernel_family) {
        for dtype in FUSED128_DTYPES {
            names.extend(["_ll", "_ll128"].map(|end| fused_name(family, dtype, end)));
        }
    }
    let floats = DType::ALL.into_iter().filter(|dtype| dtype.is_float());
    names.extend(floats.map(|dtype| format!("{STATISTICS_PREFIX}{dtype}")));
    for dtype in DType::ALL {
        names.extend(
            suffixes
                .iter()
                .map(|suffix| format!("{KERNEL_PREFIX}raw_{dtype}{suffix}")),
        );
        names.extend(fused(
            &["", "scatter_", "two_shot_"],
            &format!("{dtype}_ll"),
        ));
    }
    let families: BTreeSet<&str> = KERNEL_CODECS.into_iter().map(kernel_family).collect();
    for family in families {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.has_codecs()) {
            names.push(format!("{KERNEL_PREFIX}coded_{family}_{dtype}"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernels::{ImageKind, State};
    use std::fs;

    /// Returns the names of the element types in a list of `kernels/dtype/element.cuh`.
    fn elements(list: &str) -> Vec<String> {
        let text = include_str!("../../../kernels/dtype/element.cuh").replace("\\\n", "");
        let start = format!("#define {list}(X");
        let line = text.lines().find(|line| line.starts_with(&start));
        let (_, calls) = line.and_then(|line| line.split_once(") ")).expect("a list");
        let mut names = Vec::new();
        for call in calls.split(')') {
            match call.trim().split_once('(') {
                Some(("X", arguments)) => {
                    let mut arguments = arguments.split(',').map(str::trim);
                    names.extend(
                        arguments
                            .find(|&name| name != "__VA_ARGS__")
                            .map(String::from),
                    );
                }
                Some((inner, _)) => names.extend(elements(inner)),
                None => {}
            }
        }
        names
    }

    /// Returns the macro calls in a file of `kernels/entry/`, as name and first argument. A list of element
    /// types becomes one call for each type.
    fn calls(text: &str) -> Vec<(String, String)> {
        let mut calls = Vec::new();
        for line in text.lines() {
            let Some((name, arguments)) = line.split_once('(') else {
                continue;
            };
            let first = arguments.split([',', ')']).next().unwrap_or_default();
            if first.starts_with("CINCH_") && !name.starts_with('#') {
                let types = elements(name).into_iter();
                calls.extend(types.map(|dtype| (first.to_string(), dtype)));
            } else {
                calls.push((name.to_string(), first.to_string()));
            }
        }
        calls
    }

    /// Returns a file of `kernels/`, with those of `kernels/entry/` that it includes.
    fn with_entry_includes(path: &str) -> String {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let text = fs::read_to_string(format!("{root}/{path}")).unwrap();
        let included = text.lines().filter_map(|line| {
            let rest = line.strip_prefix("#include \"entry/")?;
            Some(format!("entry/{}", rest.trim_end_matches('"')))
        });
        let included: String = included.map(|path| with_entry_includes(&path)).collect();
        included + &text
    }

    /// Returns the names of the files `kernels/entry/NAME.cu`.
    fn entries() -> Vec<String> {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/entry");
        let files = fs::read_dir(directory).unwrap().filter_map(|entry| {
            let file = entry.unwrap().file_name().into_string().unwrap();
            file.strip_suffix(".cu").map(str::to_string)
        });
        files.collect()
    }

    #[test]
    fn kernels_of_collectives_alone_have_the_prefix() {
        let names = with_entry_includes("entry/name.cuh");
        let define = format!("#define CINCH_KERNEL_NAME(does) {KERNEL_PREFIX}##does\n");
        assert!(names.contains(&define), "{names}");
        for entry in entries() {
            let text = with_entry_includes(&format!("entry/{entry}.cu"));
            let kernels: Vec<&str> = text.split("__global__").skip(1).collect();
            assert!(!kernels.is_empty(), "{entry}.cu has no kernel");
            for kernel in kernels {
                let (declaration, _) = kernel.split_once('{').unwrap();
                assert_eq!(
                    declaration.contains("CINCH_KERNEL_NAME("),
                    serves_collectives(&entry),
                    "{entry}.cu: {declaration}"
                );
            }
        }
    }

    /// Returns the names of the kernels in machine code or PTX.
    fn kernels_in(kind: ImageKind, code: &[u8]) -> BTreeSet<String> {
        // A cubin has a section with the parameters of each kernel, and of nothing else.
        let (begin, end) = match kind {
            ImageKind::Code => (".nv.constant0.", '\0'),
            ImageKind::Ptx => (".entry ", '('),
        };
        let text = String::from_utf8_lossy(code);
        let names = text.split(begin).skip(1);
        names
            .map(|rest| rest.split(end).next().unwrap().into())
            .collect()
    }

    #[test]
    fn built_kernels_have_exactly_these_names() {
        let names = names().into_iter();
        let wanted: BTreeSet<String> = names.filter(|name| !is_statistics(name)).collect();
        let mut found: HashMap<String, BTreeSet<String>> = HashMap::new();
        for file in kernels::files() {
            for image in file.images {
                let code = image.unpack().unwrap();
                let names = kernels_in(image.target.kind, code.bytes());
                assert!(!names.is_empty(), "{}: {image:?}", file.name);
                if serves_collectives(file.name) {
                    let target = image.target.to_string();
                    found.entry(target).or_default().extend(names);
                } else {
                    let mut names = names.iter();
                    assert!(
                        names.all(|name| !name.starts_with(KERNEL_PREFIX)),
                        "{}",
                        file.name
                    );
                }
            }
        }
        assert_eq!(
            found.is_empty(),
            matches!(kernels::STATE, State::Missing { .. })
        );
        for (target, found) in found {
            assert_eq!(found, wanted, "{target}");
        }
    }

    #[test]
    fn kernel_entry_macros_define_exactly_these_names() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/entry");
        let mut found = BTreeSet::new();
        for entry in entries() {
            let text = fs::read_to_string(format!("{directory}/{entry}.cu")).unwrap();
            for (name, first) in calls(&text) {
                match name.as_str() {
                    "CINCH_INTERPRETER" => {
                        found.insert(format!("{KERNEL_PREFIX}{first}"));
                    }
                    "CINCH_RAW" => found.extend(
                        ["", "_ll", "_ll128"]
                            .map(|suffix| format!("{KERNEL_PREFIX}raw_{first}{suffix}")),
                    ),
                    "CINCH_CODED" => found.extend(
                        elements("CINCH_CODED_ELEMENTS")
                            .iter()
                            .map(|dtype| format!("{KERNEL_PREFIX}coded_{first}_{dtype}")),
                    ),
                    "CINCH_STATISTICS" => {
                        found.insert(format!("{STATISTICS_PREFIX}{first}"));
                    }
                    "CINCH_FUSED_LL" => {
                        found.insert(format!("{KERNEL_PREFIX}fused_{first}_ll"));
                    }
                    "CINCH_FUSED_CODED" => {
                        for dtype in elements("CINCH_CODED_ELEMENTS") {
                            let both = ["ll", "ll128"];
                            found.extend(both.map(|protocol| {
                                format!("{KERNEL_PREFIX}fused_{first}_{dtype}_{protocol}")
                            }));
                        }
                    }
                    "CINCH_FUSED_LL128" => {
                        found.insert(format!("{KERNEL_PREFIX}fused_{first}_ll128"));
                    }
                    "CINCH_FUSEDS_LL" => found.extend(
                        ["", "scatter_", "two_shot_"]
                            .map(|begin| format!("{KERNEL_PREFIX}fused_{begin}{first}_ll")),
                    ),
                    "CINCH_FUSEDS_LL128" => found.extend(
                        ["", "scatter_", "two_shot_", "to_root_"]
                            .map(|begin| format!("{KERNEL_PREFIX}fused_{begin}{first}_ll128")),
                    ),
                    _ => {}
                }
            }
        }
        let wanted: BTreeSet<String> = names().into_iter().collect();
        assert_eq!(found, wanted);
    }
}
