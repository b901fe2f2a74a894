import torch, tpplan, copy
from tests.battery.cases import CASES
from tests.battery.ranks import *
def go(member):
    c=CASES["checkpointed_reentrant"]
    mesh=member.mesh()
    stock,model=c.make(),c.make()
    torch.manual_seed(1)
    tpplan.parallelize(model,{"version":1,"modules":c.rules},mesh,c.calls[0].arguments())
    out=[]
    for i,grad in enumerate((True,True,False,False,True,False,False)):
        torch.manual_seed(3+i)
        x=torch.randn(3,6,16,dtype=torch.float64)
        a=model(x.clone().requires_grad_(grad)); b=stock(x.clone().requires_grad_(grad))
        out.append((grad, float((a-b).abs().max()), a.requires_grad, b.requires_grad, a.flatten()[:3].tolist(), b.flatten()[:3].tolist()))
        if a.requires_grad: a.sum().backward(); b.sum().backward()
    return out
