import sys,gc,time,torch,weft
from torch import nn
from tests.distributed.test_materialise import *
from weft.state.materialise import FirstValues
import weft.state.materialise as M
def go(rank):
    small = nn.Linear(8, 8, device="meta")
    weft.compile(small, torch.optim.AdamW(small.parameters()), lambda m, x: m(x).sum(), timeout=60)(torch.randn(2, 8))
    with torch.device("meta"):
        model = Large()
    step = weft.compile(model, torch.optim.AdamW(model.parameters()), mode="zero3", timeout=60)
    step.prepare((torch.zeros(1, 2, dtype=torch.int64),))
    gc.collect()
    before = status("VmRSS"); reset_peak(); log=[]
    b=FirstValues.begin; ob=FirstValues.of_bucket
    def begin(self,*a):
        b(self,*a); log.append(("begin",(status("VmRSS")-before)/2**20,(status("VmHWM")-before)/2**20))
    def of(self,bk,*a):
        r=ob(self,bk,*a); log.append((bk.describe(),r.nbytes/2**20,(status("VmRSS")-before)/2**20,(status("VmHWM")-before)/2**20)); return r
    FirstValues.begin=begin; FirstValues.of_bucket=of
    step._materialised(); 
    log.append((status("VmRSS")-before)/2**20)
    return log
if __name__=="__main__":
    p=Ranks(2); print(*p.run(go)[0],sep="\n"); p.stop()
    import cProfile,pstats
    from tests.large import *
    first_values(0,"llama","replicate")
    pr=cProfile.Profile(); pr.enable(); t=time.time(); first_values(0,"everything","replicate"); print(time.time()-t); pr.disable()
    pstats.Stats(pr).sort_stats("cumtime").print_stats(45)
