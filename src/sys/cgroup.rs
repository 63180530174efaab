//! The memory that the control groups of this process leave to it.
//!
//! A kernel kills a process that touches more memory than its control group may use. Shared memory costs nothing until
//! it is touched, so a communicator would join, and die in its first call.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The control group that leaves the least memory, of those that contain this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// Device and inode of the group's folder, equal for all processes of a host in this group.
    pub id: [u64; 2],
    /// Largest number of bytes that the group may use.
    pub limit: u64,
    /// Bytes of the limit that are free, or that the kernel frees when they are needed.
    pub free: u64,
}

/// Returns the control group that leaves the least memory; `None` without a limit.
pub fn group_memory() -> Option<GroupMemory> {
    group_memory_below(Path::new("/"), "self")
}

/// Returns what [`group_memory`] returns, for a process below /proc of the machine whose file systems are at `root`.
pub fn group_memory_below(root: &Path, process: &str) -> Option<GroupMemory> {
    let groups = fs::read_to_string(root.join("proc").join(process).join("cgroup")).ok()?;
    least(&groups, &root.join("sys/fs/cgroup"))
}

/// Returns the group that leaves the least memory, of the lines of /proc/self/cgroup and the file system of control
/// groups at `root`.
fn least(groups: &str, root: &Path) -> Option<GroupMemory> {
    let of_line = |line: &str| {
        let mut words = line.splitn(3, ':').skip(1);
        let (controllers, path) = (words.next()?, words.next()?);
        let (names, root) = match controllers.split(',').any(|name| name == "memory") {
            true => (&VERSION_1, root.join("memory")),
            // Both versions may be mounted; then version 2 lies below, and has no memory controller.
            false if controllers.is_empty() => (&VERSION_2, root.to_path_buf()),
            false => return None,
        };
        least_above(names, &root, path)
    };
    groups
        .lines()
        .filter_map(of_line)
        .min_by_key(|group| group.free)
}

/// Names of a group's files.
struct FileNames {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` with bytes that the kernel frees when they are needed: cached files, and caches of its own.
    freed: [&'static str; 3],
}

const VERSION_1: FileNames = FileNames {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    freed: [
        "total_inactive_file",
        "total_active_file",
        "slab_reclaimable",
    ],
};
const VERSION_2: FileNames = FileNames {
    limit: "memory.max",
    used: "memory.current",
    freed: ["inactive_file", "active_file", "slab_reclaimable"],
};

/// Returns the group that leaves the least memory, of the group `path` below `root` and those that contain it.
fn least_above(names: &FileNames, root: &Path, path: &str) -> Option<GroupMemory> {
    let mut folder: PathBuf = root.join(path.trim_start_matches('/'));
    // A container sees only its own group, as the root.
    if !folder.is_dir() {
        folder = root.to_path_buf();
    }
    let groups = folder.ancestors().take_while(|at| at.starts_with(root));
    groups
        .filter_map(|folder| memory_of(names, folder))
        .min_by_key(|group| group.free)
}

fn memory_of(names: &FileNames, folder: &Path) -> Option<GroupMemory> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse().ok()
    };
    // Without a limit, version 2 has the word `max`, and version 1 a number near 2^63.
    let limit = number(names.limit).filter(|&limit| limit < 1 << 60)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let freed = stat.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        names
            .freed
            .contains(&name)
            .then(|| bytes.parse::<u64>().ok())?
    });
    let used = number(names.used)?.saturating_sub(freed.sum());
    let folder = fs::metadata(folder).ok()?;
    Some(GroupMemory {
        id: [folder.dev(), folder.ino()],
        limit,
        free: limit.saturating_sub(used),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes the files of a group below a folder of this test.
    fn group(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn the_tightest_group_counts_in_both_versions() {
        let root = std::env::temp_dir().join(format!("cinch-cgroup-{}", std::process::id()));
        let two = |limit, used, stat| {
            [
                ("memory.max", limit),
                ("memory.current", used),
                ("memory.stat", stat),
            ]
        };
        group(
            &root.join("job"),
            &two(
                "1000\n",
                "900\n",
                "anon 1\ninactive_file 200\nactive_file 70\nslab_reclaimable 30\n",
            ),
        );
        group(&root.join("job/step"), &two("max\n", "800\n", ""));
        group(&root.join("other"), &two("10\n", "10\n", ""));
        let found = least("0::/job/step\n", &root).unwrap();
        assert_eq!((found.limit, found.free), (1000, 400));
        let folder = fs::metadata(root.join("job")).unwrap();
        assert_eq!(found.id, [folder.dev(), folder.ino()]);
        group(&root.join("job/step"), &two("850\n", "800\n", ""));
        assert_eq!(least("0::/job/step\n", &root).unwrap().free, 50);
        // A container has the group of its root; no group has less than no memory.
        group(&root, &two("70\n", "100\n", ""));
        let contained = least("0::/not/visible\n", &root).unwrap();
        assert_eq!((contained.limit, contained.free), (70, 0));
        let one = [
            ("memory.limit_in_bytes", "500\n"),
            ("memory.usage_in_bytes", "450\n"),
            ("memory.stat", "inactive_file 7\ntotal_inactive_file 20\n"),
        ];
        group(&root.join("memory/a"), &one);
        let groups = "9:cpu:/x\n4:memory:/a\n";
        assert_eq!(least(groups, &root).unwrap().free, 70);
        let unlimited = [("memory.limit_in_bytes", "9223372036854771712\n"), one[1]];
        group(&root.join("memory/a"), &unlimited);
        assert_eq!(least(groups, &root), None);
        assert_eq!(least("9:cpu:/x\nnonsense\n", &root), None);
        fs::remove_dir_all(&root).unwrap();
    }
}
