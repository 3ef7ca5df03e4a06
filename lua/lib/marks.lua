-- Marks of parts of which a worker died, or which took too long.
-- Beside the outcomes of a part, under the field `<number>@` of `partial`, is a mark: which of its
-- records were begun and have no outcome, after a worker died of the part, or which one took too
-- long. Workers write and read it (streamq/worker/marks.py). Earlier versions pass it over.
local function set_mark(partial, number, mark)
  if mark == "" then
    redis.call("HDEL", partial, number .. "@")
  else
    redis.call("HSET", partial, number .. "@", mark)
  end
end

-- Removes the outcomes and the marks of parts.
local function forget_outcomes(partial, parts)
  local fields = {}
  for i = 1, #parts do
    fields[2 * i - 1], fields[2 * i] = parts[i], parts[i] .. "@"
  end
  redis.call("HDEL", partial, unpack(fields))
end
