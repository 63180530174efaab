//! NUMA nodes of devices: memory and threads near them.

use super::cpu::{self, CoreSet};
use super::file;
use std::path::Path;

/// Root of the kernel's description of devices.
pub const SYS: &str = "/sys";

/// Largest number of NUMA nodes, as the kernel is configured at most.
const MAX_NODES: usize = 1024;

/// Largest size of an attribute in bytes.
const MAX_ATTRIBUTE_BYTES: usize = 4096;

/// Mode of a memory policy that takes memory of one node while it has any. From `linux/mempolicy.h`.
const MPOL_PREFERRED: libc::c_int = 1;

/// Returns the NUMA node of the PCI device at `address`, such as `0000:c1:00.0`; `None` if the kernel does not
/// know it.
pub fn node_of_pci(sys: &Path, address: &str) -> Option<usize> {
    // Names below /sys have lower-case digits; CUDA prints upper-case ones.
    let address = address.to_ascii_lowercase();
    let is_name = address
        .bytes()
        .all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.');
    if !is_name {
        return None;
    }
    let path = sys.join("bus/pci/devices").join(address).join("numa_node");
    let text = file::read_text(&path, MAX_ATTRIBUTE_BYTES).ok()?;
    // A single node that the firmware does not name is -1.
    text.trim().parse().ok().filter(|node| *node < MAX_NODES)
}

/// Returns the cores of a NUMA node; `None` if the kernel does not know them.
pub fn cores_of(sys: &Path, node: usize) -> Option<CoreSet> {
    let path = sys.join(format!("devices/system/node/node{node}/cpulist"));
    parse_list(file::read_text(&path, MAX_ATTRIBUTE_BYTES).ok()?.trim())
}

/// Returns the NUMA node that has all of `cores`; `None` if they are on several nodes, or the kernel does not know.
pub fn node_of_cores(sys: &Path, cores: &CoreSet) -> Option<usize> {
    let path = sys.join("devices/system/node/online");
    let online = parse_list(file::read_text(&path, MAX_ATTRIBUTE_BYTES).ok()?.trim())?;
    let has_all = |node: &usize| {
        online[node / 64] >> (node % 64) & 1 == 1
            && cores_of(sys, *node)
                .is_some_and(|of_node| cores.iter().zip(&of_node).all(|(own, all)| own & !all == 0))
    };
    (0..online.len() * 64).find(has_all)
}

/// Parses a list of cores, such as `0-3,8,10-11`. Cores beyond the set are left out.
fn parse_list(text: &str) -> Option<CoreSet> {
    let mut cores = CoreSet::default();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        for core in first..=last.min(cores.len() * 64 - 1) {
            cores[core / 64] |= 1 << (core % 64);
        }
    }
    (cores != CoreSet::default()).then_some(cores)
}

/// Binds the calling thread to those of its cores that are on `node`. Does nothing if it has none there, as when
/// the launcher bound it elsewhere, or if the kernel does not know the node's cores.
pub fn bind_thread(sys: &Path, node: usize) {
    let Some(of_node) = cores_of(sys, node) else {
        return;
    };
    let allowed = cpu::allowed();
    let mut near = CoreSet::default();
    for (near, (a, b)) in near.iter_mut().zip(allowed.iter().zip(&of_node)) {
        *near = a & b;
    }
    if near != CoreSet::default() && near != allowed {
        // A refusal costs distance, not correctness.
        let _ = cpu::bind_to(&near);
    }
}

/// While it lives, the calling thread takes new memory from one NUMA node while that has any.
#[derive(Debug)]
pub struct PreferredNode {
    mode: libc::c_int,
    nodes: [libc::c_ulong; MAX_NODES / 64],
    /// The policy belongs to the thread.
    _of_thread: std::marker::PhantomData<*const ()>,
}

impl PreferredNode {
    /// Prefers `node`. Returns `None` and changes nothing if the node is unknown, or the kernel has no policies,
    /// as in some containers.
    pub fn new(node: Option<usize>) -> Option<PreferredNode> {
        let node = node.filter(|node| *node < MAX_NODES)?;
        let mut before = PreferredNode {
            mode: 0,
            nodes: [0; MAX_NODES / 64],
            _of_thread: std::marker::PhantomData,
        };
        let null = std::ptr::null::<libc::c_void>();
        // SAFETY: the kernel writes one mode, and a mask of at most `MAX_NODES` bits, to local variables.
        let known = unsafe {
            let (mode, nodes) = (&raw mut before.mode, before.nodes.as_mut_ptr());
            libc::syscall(libc::SYS_get_mempolicy, mode, nodes, MAX_NODES, null, 0)
        };
        let mut wanted = [0; MAX_NODES / 64];
        wanted[node / 64] = 1 << (node % 64);
        (known == 0 && set_policy(MPOL_PREFERRED, &wanted)).then_some(before)
    }
}

impl Drop for PreferredNode {
    /// Restores the thread's policy.
    fn drop(&mut self) {
        set_policy(self.mode, &self.nodes);
    }
}

fn set_policy(mode: libc::c_int, nodes: &[libc::c_ulong; MAX_NODES / 64]) -> bool {
    // The kernel reads one bit less than it is told. A mode without nodes takes no mask.
    let bits = if nodes.iter().all(|word| *word == 0) {
        0
    } else {
        MAX_NODES + 1
    };
    let mask = if bits == 0 {
        std::ptr::null()
    } else {
        nodes.as_ptr()
    };
    // SAFETY: the kernel reads at most `MAX_NODES` bits of the mask, and changes only the thread's policy.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_ranges_and_numbers() {
        let cores = parse_list("0-3,8,64-65").unwrap();
        assert_eq!((cores[0], cores[1]), (0b1_0000_1111, 0b11));
        for text in ["", "x", "3-", "-1", "5-2"] {
            assert_eq!(parse_list(text), None, "{text}");
        }
        assert!(parse_list("0-99999999").is_some());
    }

    #[test]
    fn nodes_of_devices_are_read_below_the_root() {
        let root = std::env::temp_dir().join(format!("cinch-numa-{}", std::process::id()));
        let device = root.join("bus/pci/devices/0000:c1:00.0");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), "3\n").unwrap();
        assert_eq!(node_of_pci(&root, "0000:C1:00.0"), Some(3));
        std::fs::write(device.join("numa_node"), "-1\n").unwrap();
        assert_eq!(node_of_pci(&root, "0000:C1:00.0"), None);
        assert_eq!(node_of_pci(&root, "0000:c2:00.0"), None);
        assert_eq!(node_of_pci(&root, "../../x"), None);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn cores_on_one_node_have_its_number() {
        let root = std::env::temp_dir().join(format!("cinch-cores-{}", std::process::id()));
        let nodes = root.join("devices/system/node");
        for (node, cores) in [(0, "0-3,8-11"), (2, "4-7")] {
            std::fs::create_dir_all(nodes.join(format!("node{node}"))).unwrap();
            std::fs::write(nodes.join(format!("node{node}/cpulist")), cores).unwrap();
        }
        let cores = |text: &str| parse_list(text).unwrap();
        assert_eq!(node_of_cores(&root, &cores("0")), None, "no list of nodes");
        std::fs::write(nodes.join("online"), "0,2\n").unwrap();
        assert_eq!(node_of_cores(&root, &cores("1,8")), Some(0));
        assert_eq!(node_of_cores(&root, &cores("4-5")), Some(2));
        assert_eq!(node_of_cores(&root, &cores("3-4")), None);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn policy_of_the_thread_is_restored() {
        let policy = || {
            let mut mode: libc::c_int = -1;
            let null = std::ptr::null::<libc::c_void>();
            // SAFETY: the kernel writes one mode to a local variable, and no mask.
            let done =
                unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, null, 0, null, 0) };
            (done == 0).then_some(mode)
        };
        let Some(before) = policy() else {
            return println!("SKIPPED: no memory policies here");
        };
        assert!(PreferredNode::new(None).is_none());
        if let Some(_preferred) = PreferredNode::new(Some(0)) {
            assert_eq!(policy(), Some(MPOL_PREFERRED));
        }
        assert_eq!(policy(), Some(before));
    }
}
