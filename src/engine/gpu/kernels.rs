//! The kernels of a GPU: all of them loaded before the first launch, and found by name.
//!
//! A kernel that the driver loads at its first launch may wait for all others to end, for ever if
//! one of them waits for it; so none is left for later.

use crate::codec::{FUSED_CODECS, KERNEL_CODECS, kernel_family};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Function, Module, kernels};
use crate::plan::{FUSED128_DTYPES, Plan, Request, Resident};
use crate::types::{Algorithm, CodecKind, Collective, DType, Kernel, Protocol, ScaleRule};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Threads of a block of the fused kernels without a codec.
pub const FUSED_THREADS: u32 = 512;

/// The block of a kernel: of an interpreter, which drives one channel, or of a fused one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threads: what moves data, and of an interpreter 64 that wait and 32 that publish.
    pub threads: u32,
    /// Bytes of dynamic shared memory, which kernels of codecs fetch ahead into.
    pub shared: u32,
}

/// Threads, and bytes of dynamic shared memory for each warp that moves data, of code for sm_90 and
/// above.
pub const LARGE: [u32; 2] = [608, 11520];
/// The same of code that also runs on GPUs with 99 KiB of shared memory.
pub const SMALL: [u32; 2] = [352, 7168];
/// Threads of a block of an interpreter that move no data. A fused kernel has none.
const ASIDE: u32 = 96;

/// How a kernel is launched. Which code of the fat binary the driver took is seen by the threads that it was
/// compiled for.
pub fn shape(function: &Function) -> Shape {
    let (aside, is_coded) = match function.name().strip_prefix("cinch_oneshot_") {
        Some(does) if !is_through_codec(does) => {
            return Shape {
                threads: FUSED_THREADS,
                shared: 0,
            };
        }
        Some(_) => (0, true),
        None => (ASIDE, function.name().starts_with("cinch_coded_")),
    };
    let [threads, stage] = match function.max_threads {
        most if most < LARGE[0] - ASIDE + aside => SMALL,
        _ => LARGE,
    };
    let movers = threads - ASIDE;
    Shape {
        threads: movers + aside,
        shared: if is_coded { movers / 32 * stage } else { 0 },
    }
}

/// Whether a fused kernel of this name goes through a codec.
fn is_through_codec(does: &str) -> bool {
    let mut families = FUSED_CODECS.map(kernel_family).into_iter();
    families.any(|family| does.starts_with(family))
}

/// The kernels that are loaded on one GPU.
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    functions: HashMap<String, Function>,
}

impl Kernels {
    /// Those of the GPU of `context`, loaded by the first communicator of the process that asks.
    ///
    /// # Errors
    /// Unsupported if the build has none, or none for this GPU; those of the driver.
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
        // One that is missing says why.
        let mut modules = vec![kernels::load(context, "move")?];
        for fatbin in kernels::fatbins() {
            // The others are for trials and tests.
            if ["oneshot", "raw_", "coded_"]
                .iter()
                .any(|begin| fatbin.name.starts_with(begin))
            {
                modules.push(kernels::load(context, fatbin.name)?);
            }
        }
        let found = Arc::new(Kernels::find_in(context, &modules)?);
        loaded.push(Arc::downgrade(&found));
        Ok(found)
    }

    /// The kernels that `modules` have between them.
    ///
    /// # Errors
    /// Those of the driver.
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

    /// The kernel of this name.
    ///
    /// # Errors
    /// Unsupported if there is none.
    pub fn find(&self, name: &str) -> Result<&Function> {
        self.functions.get(name).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("this build of cinch has no kernel {name}; use another codec or protocol"),
            )
        })
    }

    /// Blocks that the GPU holds at once, whichever of its interpreters, or of its fused kernels,
    /// they run.
    ///
    /// # Errors
    /// Internal if a kernel does not fit a multiprocessor at all; those of the driver.
    pub fn resident(&self) -> Result<Resident> {
        let is_fused = |name: &str| name.starts_with("cinch_oneshot_");
        Ok(Resident {
            channels: self.blocks(|name| !is_fused(name))?,
            fused: self.blocks(is_fused)?,
        })
    }

    /// Blocks that the GPU holds at once of whichever of these kernels.
    fn blocks(&self, counts: impl Fn(&str) -> bool) -> Result<usize> {
        let mut least = u32::MAX;
        let functions = self.functions.values();
        for function in functions.filter(|function| counts(function.name())) {
            let Shape { threads, shared } = shape(function);
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

/// Refuses a call that no kernel runs, whatever the GPU. All ranks decide alike.
///
/// # Errors
/// Unsupported if the codec has no kernels or keeps scales from call to call.
pub fn check(request: &Request) -> Result<()> {
    let spec = request.codec;
    let why = if spec.is_lossy() && !KERNEL_CODECS.contains(&spec.kind) {
        format!(
            "{} has no kernels and works on host buffers only; take one of raw, {}",
            spec.kind.name(),
            KERNEL_CODECS.map(CodecKind::name).join(", ")
        )
    } else if spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. }) {
        format!(
            "scales that live from call to call are kept for host buffers only; give the codec a \
             block (\"{}:block=256\")",
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

/// The kernel that runs a plan.
pub fn name_for(plan: &Plan) -> String {
    let suffix = match (plan.kernel.kernel, plan.kernel.protocol) {
        (Kernel::Schedule, Protocol::Simple) => "",
        (Kernel::Schedule, Protocol::Ll) => "_ll",
        (Kernel::Schedule, Protocol::Ll128) => "_ll128",
        (Kernel::Fused, _) if plan.codec.is_some() => {
            let family = kernel_family(plan.spec.kind);
            return format!("cinch_oneshot_{family}_{}_ll128", plan.dtype);
        }
        (Kernel::Fused, protocol) => {
            let end = match protocol {
                Protocol::Ll128 => "_ll128",
                _ => "",
            };
            let begin = match (plan.collective, plan.algorithm) {
                (Collective::ReduceScatter | Collective::AllToAll, _) => "scatter_",
                (Collective::AllReduce, Algorithm::Direct) => "twice_",
                (Collective::Broadcast, _) => "from_root_",
                (Collective::Reduce, _) => "to_root_",
                _ => "",
            };
            return match plan.collective.reduces() {
                true => format!("cinch_oneshot_{begin}{}{end}", plan.dtype),
                false => format!("cinch_oneshot_{begin}move{end}"),
            };
        }
    };
    if plan.codec.is_some() {
        format!(
            "cinch_coded_{}_{}",
            kernel_family(plan.spec.kind),
            plan.dtype
        )
    } else if plan.collective.reduces() {
        format!("cinch_raw_{}{suffix}", plan.dtype)
    } else {
        format!("cinch_move{suffix}")
    }
}

/// Every name that [`name_for`] can give.
fn names() -> Vec<String> {
    let suffixes = ["", "_ll", "_ll128"];
    let mut names: Vec<String> = suffixes
        .iter()
        .map(|suffix| format!("cinch_move{suffix}"))
        .collect();
    let fused = |begins: &[&str], does: &str| {
        begins
            .iter()
            .map(|begin| format!("cinch_oneshot_{begin}{does}"))
            .collect::<Vec<_>>()
    };
    for end in ["", "_ll128"] {
        names.extend(fused(&["", "scatter_"], &format!("move{end}")));
    }
    for dtype in FUSED128_DTYPES {
        names.extend(fused(
            &["", "scatter_", "twice_", "to_root_"],
            &format!("{dtype}_ll128"),
        ));
    }
    names.extend(fused(&["from_root_"], "move_ll128"));
    for family in FUSED_CODECS.map(kernel_family) {
        let types = FUSED128_DTYPES.map(|dtype| format!("cinch_oneshot_{family}_{dtype}_ll128"));
        names.extend(types);
    }
    for dtype in DType::ALL {
        names.extend(
            suffixes
                .iter()
                .map(|suffix| format!("cinch_raw_{dtype}{suffix}")),
        );
        names.extend(fused(&["", "scatter_", "twice_"], &dtype.to_string()));
    }
    let families: BTreeSet<&str> = KERNEL_CODECS.into_iter().map(kernel_family).collect();
    for family in families {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            names.push(format!("cinch_coded_{family}_{dtype}"));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The kernels that the macros of `kernels/entry` make, read from the text.
    #[test]
    fn the_kernels_have_these_names() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/entry");
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "cu") {
                continue;
            }
            for line in fs::read_to_string(path).unwrap().lines() {
                let Some((name, arguments)) = line.split_once('(') else {
                    continue;
                };
                let first = arguments.split(',').next().unwrap_or_default();
                match name {
                    "CINCH_INTERPRETER" => {
                        found.insert(first.to_string());
                    }
                    "CINCH_RAW" => found.extend(
                        ["", "_ll", "_ll128"].map(|suffix| format!("cinch_raw_{first}{suffix}")),
                    ),
                    "CINCH_CODED" => found.extend(
                        ["f32", "f16", "bf16"].map(|dtype| format!("cinch_coded_{first}_{dtype}")),
                    ),
                    "CINCH_ONESHOT" => {
                        found.insert(format!("cinch_oneshot_{first}"));
                    }
                    "CINCH_ONESHOT_CODED" => found.extend(
                        ["f32", "f16", "bf16"]
                            .map(|dtype| format!("cinch_oneshot_{first}_{dtype}_ll128")),
                    ),
                    "CINCH_ONESHOT_LL128" => {
                        found.insert(format!("cinch_oneshot_{first}_ll128"));
                    }
                    "CINCH_ONESHOTS" => found.extend(
                        ["", "scatter_", "twice_"]
                            .map(|begin| format!("cinch_oneshot_{begin}{first}")),
                    ),
                    "CINCH_ONESHOTS_LL128" => found.extend(
                        ["", "scatter_", "twice_", "to_root_"]
                            .map(|begin| format!("cinch_oneshot_{begin}{first}_ll128")),
                    ),
                    _ => {}
                }
            }
        }
        let wanted: BTreeSet<String> = names().into_iter().collect();
        assert_eq!(found, wanted);
    }
}
