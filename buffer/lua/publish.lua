-- The learner's weights are a new version. ARGV: version, held-out tasks to evaluate (0: none), tasks per ticket.
-- Publishing a version twice changes nothing.
local version, tasks, slice = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local last = redis.call('HGET', key('meta'), 'version')
if not last or version > tonumber(last) then
  redis.call('HSET', key('meta'), 'version', version, 'consumed', 0)
end
if tasks > 0 and redis.call('EXISTS', key('eval:' .. version)) == 0 then
  local before = redis.call('HGET', key('meta'), 'evaluated')
  if before then
    for _, id in ipairs(redis.call('SMEMBERS', key('eval:' .. before .. ':groups'))) do
      redis.call('DEL', key('group:' .. id))
    end
    for _, name in ipairs({'eval_todo:', 'eval_issued:', 'eval_holder:', 'eval_since:', 'eval_handed:',
      'eval_failures:'}) do
      redis.call('DEL', key(name .. before))
    end
    redis.call('DEL', key('eval:' .. before .. ':groups'))
  end
  redis.call('HSET', key('meta'), 'evaluated', version)
  redis.call('HSET', key('eval:' .. version), 'tasks', tasks)
  for first = 0, tasks - 1, slice do
    redis.call('RPUSH', key('eval_todo:' .. version), first .. ':' .. math.min(slice, tasks - first))
  end
end
return version
