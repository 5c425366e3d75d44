-- (task) -> issued, for as many tickets as the server's credits, the staleness capacity and the rate limit allow.
-- ARGV: server, its policy version, its credits in this shard, max_staleness, groups per version, ticket deadline in s,
-- tasks of this shard, this shard, all shards, samples per insert (0: no rate limit), largest difference.
-- Returns a flat list: the credits that the server has left (0 if it can't be given anything), then id, epoch, position in
-- the epoch, ...
--
-- Admission (AReaL, arXiv 2505.24298, section 5.1, relative to the last publication): a group issued now is consumed after
-- the `pipeline` groups before it, so at version + floor((consumed + pipeline) / per_version), where `consumed` counts
-- the groups trained since `version` was published. It is issued only if that is at most max_staleness versions
-- ahead of the version that will generate it. The learner may have lowered that bound (throttle.lua): then nothing is
-- issued until the pipeline has drained below it. At 0 it still holds the groups of one version, so training goes on.
local server, server_version = ARGV[1], tonumber(ARGV[2])
local free = tonumber(ARGV[3]) - redis.call('SCARD', key('tickets_of:' .. ARGV[1]))
local max_staleness, per_version, deadline_s, tasks = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local shard, shards = tonumber(ARGV[8]), tonumber(ARGV[9])
local per_insert, max_diff = tonumber(ARGV[10]), tonumber(ARGV[11])

local meta = redis.call('HMGET', key('meta'), 'finished', 'epoch', 'position')
if meta[1] then return {0} end
local epoch, position = tonumber(meta[2] or 0), tonumber(meta[3] or 0)
local allowed, generating = room(max_staleness, per_version, server_version)
local wanted = math.min(free, allowed)
if per_insert > 0 then
  -- Reverb's SampleToInsertRatio (arXiv 2102.04736), see limiter.py.
  local inserts, samples = rate()
  wanted = math.min(wanted, math.floor((max_diff + samples - inserts * per_insert) / per_insert + ROUNDING))
end
if wanted <= 0 then return {math.max(0, free)} end
-- Judged silent a moment ago (sweep.lua), perhaps by another service: nobody would take back what it is given now.
if not redis.call('ZSCORE', key('heard'), server) then return {0} end

local granted, ids, groups = {free - wanted}, {}, {}
local again = redis.call('LPOP', key('reissue'), wanted) or {}
local number = redis.call('HINCRBY', key('meta'), 'next_id', wanted) - wanted
for i = 1, wanted do
  local task_epoch, task_position
  if again[i] then
    task_epoch, task_position = again[i]:match('(%d+):(%d+)')
  else
    if position >= tasks then epoch, position = epoch + 1, 0 end
    -- The shards deal the epoch's order among them.
    task_epoch, task_position = epoch, position * shards + shard
    position = position + 1
  end
  local id = string.format('%d', (number + i) * shards + shard)
  ids[i] = id
  groups[i] = {
    id = id, score = now() + deadline_s, detail = 'to ' .. server,
    facts = {'server', server, 'epoch', task_epoch, 'position', task_position, 'version', generating,
      'issued_at', stamp()},
  }
  granted[#granted + 1] = id
  granted[#granted + 1] = tonumber(task_epoch)
  granted[#granted + 1] = tonumber(task_position)
end
call_with('SADD', key('tickets_of:' .. server), ids)
enter_all('issued', groups)
redis.call('HSET', key('meta'), 'epoch', epoch, 'position', position)
count('issued', wanted)
return granted
