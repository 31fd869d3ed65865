//! The Mooncake engine on the real library and the real master: what a store promises, with both transports. The Ascend
//! runtime is simulated; no NPU takes part.

use backend_ascend::AscendDevice;
use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Error, Options, Put, StoreClient, TensorRef,
    hal::{Device, LogicalId},
};
use haulier_tests::{
    mooncake::{Trial, cluster, role},
    world::bytes,
};

const MIB: u64 = 1 << 20;

fn semantics<D: Device>(device: D) -> StoreClient<D> {
    let client = StoreClient::mooncake(device, &cluster(256 * MIB), Options::default()).unwrap();
    client.health().unwrap();
    for len in [0, 1, 4096, 65_536, 65_537, 1 << 20, 9 << 20] {
        let (key, value, other) = (format!("a/{len}"), bytes(1, len), bytes(2, len + 1));
        assert!(!client.exists(&key).unwrap());
        assert!(matches!(client.get(&key), Err(Error::NotFound)));
        assert!(!client.remove(&key).unwrap());
        assert_eq!(client.put(&key, &value).unwrap(), Put::Stored);
        assert_eq!(client.put(&key, &other).unwrap(), Put::AlreadyExists);
        assert_eq!(client.get(&key).unwrap(), value);
        assert_eq!(client.size(&key).unwrap(), len as u64);
        let mut target = vec![0xEE; len + 7];
        assert_eq!(client.get_into(&key, &mut target).unwrap(), len as u64);
        assert_eq!((&target[..len], &target[len..]), (&value[..], &[0xEE; 7][..]));
        if len > 0 {
            let small = client.get_into(&key, &mut target[..len - 1]);
            assert!(matches!(small, Err(Error::TooSmall { need }) if need == len as u64), "{small:?}");
        }
        assert_eq!(client.upsert(&key, &other).unwrap(), Put::Replaced);
        assert_eq!(client.get(&key).unwrap(), other);
        // At once, although the reads took leases.
        assert!(client.remove(&key).unwrap());
        assert!(!client.exists(&key).unwrap());
        assert_eq!(client.upsert(&key, &value).unwrap(), Put::Stored);
    }

    let verdicts = client.batch_put(vec![
        ("b/1", (&bytes(1, 100)).into()),
        ("a/1", (&bytes(1, 100)).into()),
        ("", (&bytes(1, 100)).into()),
        ("b/1", (&bytes(2, 100)).into()),
        ("b/2", (&bytes(3, 100_000)).into()),
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
    let got = client.batch_get(&["b/2", "absent", "b/1", "b/2"]);
    assert_eq!(got[0].as_ref().unwrap(), &bytes(3, 100_000));
    assert!(matches!(got[1], Err(Error::NotFound)));
    assert_eq!(got[2].as_ref().unwrap(), &bytes(1, 100));
    assert_eq!(got[3].as_ref().unwrap(), &bytes(3, 100_000));

    for (key, rows) in [("t/small", 3), ("t/large", 3000)] {
        let value = bytes(4, rows as usize * 24);
        client.put_tensor(key, &TensorRef::new(Dtype::BF16, &[rows, 12], &value).unwrap()).unwrap();
        let tensor = client.get_tensor(key).unwrap();
        assert_eq!((tensor.spec.dtype, &tensor.spec.shape[..]), (Dtype::BF16, &[rows, 12][..]));
        assert_eq!(tensor.bytes, value);
        assert_eq!(client.view_tensor(key).unwrap().spec(), &tensor.spec);
    }

    assert_eq!(client.remove_by_prefix("b/").unwrap(), 2);
    for refused in [
        client.list("").map(drop),
        client.stat().map(drop),
        client.alloc(1).map(drop),
        client.pin("a/1").map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
    client
}

/// Of two clients with the same keys.
fn tenants(client: StoreClient<CpuDevice>) {
    let other = Options { namespace: "a".into(), ..Options::default() };
    let other = StoreClient::mooncake(client.device().clone(), &cluster(0), other).unwrap();
    assert!(!other.exists("a/1").unwrap());
    other.put("a/1", &bytes(9, 9)).unwrap();
    other.put("a.1", &bytes(9, 9)).unwrap();
    other.put("axb", &bytes(9, 90_000)).unwrap();
    assert_eq!(other.remove_by_prefix("a.").unwrap(), 1);
    assert_eq!(other.get("axb").unwrap(), bytes(9, 90_000));
    assert_eq!(client.clear().unwrap(), 9);
    assert!(!client.exists("a/1").unwrap());
    assert_eq!(other.get("a/1").unwrap(), bytes(9, 9));

    client.close();
    assert!(matches!(client.put("k", b"v"), Err(Error::Closed)));
    assert!(matches!(client.exists("k"), Err(Error::Closed)));
}

#[test]
fn a_store_keeps_its_promises_over_tcp() {
    if role().is_some() {
        return tenants(semantics(CpuDevice::open().unwrap()));
    }
    let Some(trial) = Trial::new("a_store_keeps_its_promises_over_tcp", "9.0.0", "tcp") else { return };
    trial.run("client");
}

#[test]
fn a_store_keeps_its_promises_over_ascend() {
    if role().is_some() {
        // One client: the simulated runtime moves nothing between two.
        semantics(AscendDevice::open(LogicalId(1)).unwrap());
        return;
    }
    let Some(trial) = Trial::new("a_store_keeps_its_promises_over_ascend", "9.0.0", "ascend") else { return };
    trial.run("client");
}
