//! How many physical cores this process may use.

use std::collections::BTreeSet;
use std::fs;
use std::sync::OnceLock;
use std::thread;

/// Physical cores this process may use: the affinity mask and the cgroup's quota count, hyperthreads do not.
#[must_use]
pub fn physical_cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| {
        let logical = thread::available_parallelism().map_or(1, usize::from);
        allowed_cores().map_or(logical, |cores| cores.clamp(1, logical))
    })
}

/// Distinct cores behind the logical processors of the affinity mask; `None` where Linux does not say.
fn allowed_cores() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for cpu in parse_cpu_list(list.trim())? {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        cores.insert(fs::read_to_string(path).ok()?.trim().to_owned());
    }
    Some(cores.len())
}

/// The numbers of a list such as `0-3,8`.
fn parse_cpu_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last - first > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors() {
        assert_eq!(parse_cpu_list("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_cpu_list("5"), Some(vec![5]));
        assert_eq!(parse_cpu_list("3-1"), None);
        assert_eq!(parse_cpu_list("x"), None);
    }

    #[test]
    fn at_least_one_core_and_no_more_than_threads() {
        let logical = thread::available_parallelism().unwrap().get();
        assert!((1..=logical).contains(&physical_cores()));
    }
}
