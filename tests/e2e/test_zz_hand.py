import pytest, numpy as np
from runs import iterate, mixed, new_run, weights_of, actor_mappings
pytestmark=[pytest.mark.timeout(580)]
V={"engine":"vllm","vllm":{"kv_cache_gib":0.0625,"max_model_len":2048}}

def distance(found, expected, start):
    difference = sum(float(np.square(found[name].astype("f8") - expected[name]).sum()) for name in start)
    moved = sum(float(np.square(expected[name].astype("f8") - start[name]).sum()) for name in start)
    return (difference / moved) ** 0.5

@pytest.mark.parametrize("case", ["vllm11", "torch21"])
def test_hand(another_mesh, prompts, image, tmp_path, case):
    sections={"rollout":V} if case.startswith("vllm") else {}
    sizes={"train_tensor_parallel":int(case[-2]),"rollout_tensor_parallel":int(case[-1])}
    found={}
    with another_mesh(sizes=sizes, **sections) as m, m.client as client:
        run=new_run(client, schedule="serial", deterministic=True)
        start=weights_of(client, run, tmp_path/"start")
        last=iterate(client, run, mixed(prompts, image), 3)
        print({k:v for k,v in last.metrics.items() if "rollout" in k or "kl" in k})
        found["serial"]=weights_of(client, run, tmp_path/"serial")
    with another_mesh(sizes={**sizes,"own_replicas":1}, **sections) as m, m.client as client:
        run=new_run(client, schedule="disaggregated", deterministic=True)
        last=iterate(client, run, mixed(prompts, image), 3)
        print({k:v for k,v in last.metrics.items() if "copy" in k or "rollout" in k or "kl" in k})
        found["dis"]=weights_of(client, run, tmp_path/"dis")
        print([(r.device,r.role,r.slab_count,r.size_bytes) for r in client.mesh().ledger if r.object_class=="actor_snapshot"])
    same=all(found["dis"][n].tobytes()==found["serial"][n].tobytes() for n in start)
    print("HAND", case, "identical", same, "distance", distance(found["dis"], found["serial"], start))
