//! A node that keeps its values in a Mooncake cluster, as one client of it for all of its own: the real library, the real
//! master, over TCP and in host memory. The CANN that the library wants to load is simulated; no NPU takes part.
//!
//! The light clients load no Mooncake: they are actors, and the test's own process. "Another host" is a process of the test
//! that joins the cluster by itself, or another daemon.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Error, Options, Put, StoreClient, Target, TensorRef,
    hal::{Device, DeviceExt},
};
use haulier_tests::{
    actor,
    mooncake::{SLOW, Trial, cluster, role, sign, wait_for_sign},
    process::{Daemon, binary_with_mooncake, wait_for},
    world::{bytes, marked, seed_of},
};

const MIB: u64 = 1 << 20;

/// A counter of the daemon's.
fn counted(client: &StoreClient<CpuDevice>, line: &str) -> u64 {
    let text = client.metrics().unwrap();
    let value = text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{line} is not in\n{text}"))
}

fn free(client: &StoreClient<CpuDevice>) -> u64 {
    client.stat().unwrap().free
}

/// An engine that joins the cluster by itself, in a process that has a role.
fn another_host() -> StoreClient<CpuDevice> {
    StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(0), Options::default()).unwrap()
}

/// Sizes around what travels in a message, in a head, in a body.
const SIZES: [usize; 9] = [0, 1, 2048, 2049, 65_536, 65_537, 300_000, 1 << 20, 9 << 20];

fn daemon(trial: &Trial) -> Daemon {
    trial.serve("64MiB", "256MiB").start()
}

#[test]
fn light_clients_store_read_and_remove_what_is_in_the_cluster() {
    const TEST: &str = "light_clients_store_read_and_remove_what_is_in_the_cluster";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let daemon = daemon(&trial);
    assert_eq!(daemon.ready["mooncake"], trial.master.address());
    let client = daemon.client();
    let (mut one, mut other) = (actor!(daemon.socket()), actor!(daemon.socket()));
    let at_rest = free(&client);
    for len in SIZES {
        let (key, value) = (format!("a/{len}"), bytes(1, len));
        assert!(!client.exists(&key).unwrap());
        assert!(matches!(client.get(&key), Err(Error::NotFound)));
        assert!(!client.remove(&key).unwrap());
        assert_eq!(client.put(&key, &value).unwrap(), Put::Stored);
        assert_eq!(client.put(&key, &bytes(2, len + 1)).unwrap(), Put::AlreadyExists);
        assert!(client.exists(&key).unwrap());
        assert_eq!(client.size(&key).unwrap(), len as u64);
        assert_eq!(client.get(&key).unwrap(), value);
        let view = client.view(&key).unwrap();
        let mut target = vec![0xEE; len + 7];
        assert_eq!(client.get_into(&key, &mut target).unwrap(), len as u64);
        assert_eq!((&target[..len], &target[len..]), (&value[..], &[0xEE; 7][..]));
        if len > 0 {
            let small = client.get_into(&key, &mut target[..len - 1]);
            assert!(matches!(small, Err(Error::TooSmall { need }) if need == len as u64), "{small:?}");
        }
        assert_eq!(client.upsert(&key, &bytes(3, len)).unwrap(), Put::Replaced);
        assert_eq!(client.get(&key).unwrap(), bytes(3, len));
        assert!(client.remove(&key).unwrap());
        assert!(!client.exists(&key).unwrap());
        assert_eq!(client.upsert(&key, &value).unwrap(), Put::Stored);
        // The view is of what was there when it was taken.
        assert_eq!(&view[..], value);
    }
    wait_for("all memory to be free again", || (free(&client) == at_rest).then_some(()));

    // Two other processes: each sees what the other stored, and which of them did.
    for (n, len) in [100, 4000, 70_000, 5 << 20].into_iter().enumerate() {
        let key = format!("b/{len}");
        one.expect(format!("put {key} {n} {len}"), "Stored");
        other.expect(format!("put {key} 77 {len}"), "AlreadyExists");
        other.expect(format!("seed {key}"), &n.to_string());
        other.expect(format!("seed-into {key} {len}"), &n.to_string());
        other.expect(format!("hold {key}"), "held");
        one.expect(format!("remove {key}"), "true");
        // No index answers for what is gone, and a new value is seen at once.
        assert!(other.ask(format!("seed {key}")).contains("nothing is stored under this key"));
        one.expect(format!("put {key} 55 {len}"), "Stored");
        other.expect(format!("seed {key}"), "55");
        other.expect(format!("seed-held {key}"), &n.to_string());
    }

    // Batches, with verdicts in order and a key that comes again.
    let (small, large) = (bytes(1, 100), bytes(2, 100_000));
    let verdicts = client.batch_put(vec![
        ("c/1", (&small).into()),
        ("a/1", (&small).into()),
        ("", (&small).into()),
        ("c/1", (&large).into()),
        ("c/2", (&large).into()),
    ]);
    assert!(
        matches!(
            verdicts[..],
            [
                Ok(Put::Stored),
                Ok(Put::AlreadyExists),
                Err(Error::InvalidKey { .. }),
                Ok(Put::AlreadyExists),
                Ok(Put::Stored)
            ]
        ),
        "{verdicts:?}"
    );
    let got = client.batch_get(&["c/2", "absent", "c/1", "", "c/2"]);
    assert_eq!((got[0].as_ref().unwrap(), got[2].as_ref().unwrap()), (&large, &small));
    assert!(matches!(got[1], Err(Error::NotFound)));
    assert!(matches!(got[3], Err(Error::InvalidKey { .. })));
    assert_eq!(got[4].as_ref().unwrap(), &large);
    let there = client.batch_exists(&["c/2", "absent", "c/1"]);
    assert!(matches!(there[..], [Ok(true), Ok(false), Ok(true)]), "{there:?}");

    // More than the pool in one batch goes in turns.
    let many: Vec<(String, Vec<u8>)> = (0..12).map(|n| (format!("d/{n}"), bytes(n, 9 << 20))).collect();
    let items = many.iter().map(|(key, value)| (key.as_str(), value.into()));
    assert!(client.batch_put(items.collect()).into_iter().all(|put| put.unwrap() == Put::Stored));
    let mut targets: Vec<Vec<u8>> = many.iter().map(|(_, value)| vec![0; value.len()]).collect();
    let items = many.iter().zip(&mut targets).map(|((key, _), target)| (key.as_str(), Target::from(target)));
    assert!(client.batch_get_into(items.collect()).into_iter().all(|got| got.unwrap() == 9 << 20));
    assert!(many.iter().zip(&targets).all(|((_, value), target)| value == target));

    // Tensors, memory of the store, memory of a device.
    let value = bytes(4, 3000 * 24);
    client.put_tensor("t", &TensorRef::new(Dtype::BF16, &[3000, 12], &value).unwrap()).unwrap();
    let tensor = client.get_tensor("t").unwrap();
    assert_eq!((tensor.spec.dtype, &tensor.spec.shape[..]), (Dtype::BF16, &[3000, 12][..]));
    assert_eq!(tensor.bytes, value);
    one.expect("alloc e 9 200000", "reserved");
    one.expect("commit e", "Stored");
    other.expect("seed e", "9");
    one.expect("put-device f 10 300000", "Stored");
    other.expect("seed f", "10");
    let mut buffer = client.device().buffer(300_000).unwrap();
    assert_eq!(client.get_into("f", &mut buffer).unwrap(), 300_000);
    let mut target = vec![0; 300_000];
    buffer.allocation().read(0, &mut target).unwrap();
    assert_eq!(seed_of(&target).unwrap(), 10);
    assert!(counted(&client, "haulier_operations_total{op=\"get\",path=\"ipc\",outcome=\"found\"} ") == 1);
    assert!(counted(&client, "haulier_operations_total{op=\"put\",path=\"ipc\",outcome=\"stored\"} ") == 1);

    // What Mooncake does not have.
    for refused in [client.list("").map(drop), client.pin("e").map(drop)] {
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
    assert_eq!(client.remove_by_prefix("d/").unwrap(), 12);
    let elsewhere = daemon.client_with(Options { namespace: "n/1".into(), ..Options::default() });
    assert!(!elsewhere.exists("e").unwrap());
    elsewhere.put("e", &small).unwrap();
    assert_eq!(elsewhere.clear().unwrap(), 1);
    assert!(client.clear().unwrap() > 10);
    assert!(!client.exists("e").unwrap());
}
