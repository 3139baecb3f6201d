"""ShardedIndex: one index over shards on several machines."""
import secrets
from typing import Any, Self
import tempfile
from pathlib import Path
import numpy as np
import numpy.typing as npt
import ray
from memhier.ann.cluster.cells import Cells, SAMPLE_OF_CELL
from memhier.ann.cluster.routing import Routing, gaps, NEIGHBOURS
from memhier.ann.cluster.shard import Shard, ShardBuild, ClusterMap
from memhier.ann.cluster.group import ShardGroup, Call, _actor
from memhier.ann.zoom import SearchResult
from memhier.ann.zoom.source import open_source
from memhier.budget import parse_bytes

class ShardedIndex:
    def __init__(self, group, cells, routing): self._group, self._cells, self._routing = group, cells, routing

    @classmethod
    def build(cls, path, vectors, *, shards, metric="l2", dram="64MiB", seed=0, cells=None, share=0.5):
        nodes=[[ray.get_runtime_context().get_node_id()]]*shards
        builders=[_actor(ShardBuild, nodes[s][0]).remote(str(path), s, 0) for s in range(shards)]
        with tempfile.TemporaryDirectory() as scratch, open_source(vectors, Path(scratch)) as source:
            rng=np.random.default_rng(seed)
            m=cells or min(64*shards, 4096)
            take=np.sort(rng.choice(source.count, min(source.count, m*SAMPLE_OF_CELL), replace=False))
            sample=source.take(take)
            c=Cells.train(sample, metric, m, shards, seed)
            held=take[np.sort(rng.choice(len(take), min(len(take),1024), replace=False))]
            queries=source.take(held).astype(np.float32)
            for start, block in source.blocks():
                own=c.owner(block)
                ray.get([builders[s].take.remote(block[own==s], start+np.flatnonzero(own==s), {}, None) for s in range(shards) if (own==s).any()])
            empty=np.empty((0,source.dimension), source.dtype)
        counts=ray.get([b.build.remote(empty, dict(metric=metric, dram=parse_bytes(dram,"dram")//shards, seed=seed)) for b in builders])
        print("counts", counts)
        for b in builders: ray.kill(b)
        group=ShardGroup(str(path), nodes, True)
        # calibration
        k=max(NEIGHBOURS)
        res=group.ask([Call(s,"search",(queries,k+1,{"recall":1.0})) for s in range(shards)])
        ids=np.hstack([r.ids for r in res]); d=np.hstack([r.distances for r in res]); sh=np.repeat(np.arange(shards),k+1)[None].repeat(len(queries),0)
        mine=ids==held[:,None]; d[mine]=np.inf; ids[mine]=-1
        rem=c.remoteness(queries)
        first=rem.argmin(1)
        needs={}
        order=np.lexsort((ids,d),axis=1)
        for kk in NEIGHBOURS:
            own=np.where(sh==first[:,None], d, np.inf); own.sort(axis=1)
            kth=c.squared(own[:,kk-1], queries)
            g=gaps(rem,kth)
            near=np.take_along_axis(sh,order[:,:kk],1)
            needs[kk]=np.take_along_axis(g,near,1)
        self=cls(group,c,Routing.measured(needs)); self.counts=counts
        return self

    def search(self, queries, k, recall=0.99, share=0.5, **options):
        q=np.asarray(queries,np.float32); n=len(q)
        loss=1-recall
        rem=self._cells.remoteness(q); first=rem.argmin(1); S=rem.shape[1]
        inner=1-loss*(1-share) if recall<1 else 1.0
        limit=self._routing.limit(k, 1-loss*share)
        ids=[np.full((n,k),-1,np.int64)]; ds=[np.full((n,k),np.inf,np.float32)]
        asked=np.zeros((n,S),bool); asked[np.arange(n),first]=True
        stats={}
        def wave(ask, radius):
            shards=np.flatnonzero(ask.any(0))
            rows=[np.flatnonzero(ask[:,s]) for s in shards]
            out=self._group.ask([Call(int(s),"search",(q[r],k,{"recall":inner}|options|({} if radius is None else {"radius":radius[r]}))) for s,r in zip(shards,rows)])
            for s,r,o in zip(shards,rows,out):
                i=np.full((n,k),-1,np.int64); d=np.full((n,k),np.inf,np.float32); i[r]=o.ids; d[r]=o.distances
                ids.append(i); ds.append(d)
                for key,v in o.stats.items():
                    if isinstance(v,int): stats[key]=stats.get(key,0)+v
        wave(asked,None)
        kth=np.min([d[:,-1] for d in ds],axis=0)
        g=gaps(rem,self._cells.squared(kth,q))
        more=(g<=limit)&~asked
        if more.any(): wave(more,np.where(np.isfinite(kth),kth,np.inf))
        I=np.hstack(ids); D=np.hstack(ds)
        order=np.lexsort((I,D),axis=1)[:,:k]
        stats["shards"]=(asked|more).sum()/n
        return SearchResult(np.take_along_axis(I,order,1),np.take_along_axis(D,order,1),stats)
