-- A reduce with a width works as a tree. Its inbox is numbered by arrival. Each time that so many
-- results have arrived, a part of the reduce is made of them, which is called by its first and last,
-- such as `1-1000`. What it yields arrives again. When nothing else is left, the final part is made:
-- it has what no other part has, and what it yields is the result. So server and worker hold no more
-- results than the width for each level.

-- Returns the tree that the stage feeds, or is of; false where there is none.
local function tree_of(f)
  if f.tree == nil then
    local b = f.barrier
    if f.kind == "reduce" then
      b = {
        number = f.own, parts = f.k.parts, leases = f.k.leases, retry = f.k.retry,
        failed = f.k.failed, tries = f.k.tries, got = f.got,
      }
    end
    local found = b and redis.call("HMGET", meta_of(f, b.number), "width", "arrived", "assigned", "final")
    local width = found and tonumber(found[1]) or 0
    f.tree = width > 0 and {
      b = b, width = width, arrived = tonumber(found[2]) or 0, assigned = tonumber(found[3]) or 0,
      final = tonumber(found[4]) or 0,
    }
  end
  return f.tree
end

-- Returns the first and the last arrival of a part that is called by them; nil for a final part.
local function run_of(origin)
  return string.match(origin, "^(%d+)%-(%d+)$")
end

-- Returns how many parts of the tree failed, besides the final one.
local function failed_runs(f, t)
  local failed = stage_at(f, t.b.number).failed or 0
  return failed - (t.final > 0 and redis.call("HEXISTS", t.b.failed, t.final) or 0)
end

-- Writes what has arrived in this script.
local function save_tree(f)
  local t = f.tree
  if t and t.is_touched then
    redis.call("HSET", meta_of(f, t.b.number), "arrived", t.arrived, "assigned", t.assigned,
      "final", t.final)
  end
end
